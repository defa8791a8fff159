"""Stubs generated from proto/tenure/v1; do not edit."""
