//! The objects that a kube-proxy needs, from the API servers of a cluster and from a folder of manifests, as one stream of
//! [`Event`](proxy_core::model::Event)s with the types of `proxy_core::model`. Nothing here knows of BPF, of maps or of an agent.
//!
//! * [`api`]: watches Services, `EndpointSlice`s, `ServiceCIDR`s and Nodes. It uses all API servers of a cluster,
//!   reconnects for ever, and reads credentials again when their files change. Each object is converted as it arrives, so that the
//!   large Kubernetes types exist only for a moment.
//! * [`source`]: the same objects from a folder of manifests.
//!
//! `examples/follow.rs` is the smallest controller.

pub mod api;
#[cfg(unix)]
pub mod source;
