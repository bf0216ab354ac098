"""Certificates of ``titan verify``: digests of a recipe, code, data and weights that equalled one device on meshes."""
