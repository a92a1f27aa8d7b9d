"""What two recordings show."""
