"""Functions that several plugins need. They make no decisions about a job."""
