//! Kubernetes' objects: read from an API server, and turned into ours.
