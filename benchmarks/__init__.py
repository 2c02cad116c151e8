"""Measurements of Tidegate: `./dev bench`. They report what they find and assert nothing about time."""
