//! The BPF maps that hold the Services. Only this module knows how they are written.
//!
//! [`KernelStore`] implements the interface of the layer above ([`proxy_core::store::Store`]) over the pinned maps.

mod family;
pub mod flow_growth;
pub mod forget;
mod kernel;
mod mapping;
pub mod segments;
pub mod settings;
pub mod sys;
pub mod view;
mod windows;

pub use kernel::KernelStore;
