//! Legal clusters.
