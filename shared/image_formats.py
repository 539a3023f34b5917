"""Which encoded images are read: Pillow knows more formats, and one of them, EPS, runs Ghostscript."""

from __future__ import annotations

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")
