"""What the doctor found, in the forms that people and programs read."""
