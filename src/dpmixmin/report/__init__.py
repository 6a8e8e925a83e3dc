"""What people look at: tables, figures and one page, all from the long table of measurements."""
