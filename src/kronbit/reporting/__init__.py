"""What an optimizer says of itself."""
