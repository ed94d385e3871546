//! The cluster as Ballast understands it: no Kubernetes types, no clock, no IO.

pub mod net;
