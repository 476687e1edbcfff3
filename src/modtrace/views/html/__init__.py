"""Tables as HTML for notebooks: static, and readable on light and on dark pages."""
