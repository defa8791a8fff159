"""Python client for Tenure."""
