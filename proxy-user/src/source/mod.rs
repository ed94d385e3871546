//! The other place that objects come from: a folder of manifests, which needs no cluster.
