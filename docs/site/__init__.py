"""The site of the documentation: pages for mkdocs-material and zensical, which read the same mkdocs.yml."""
