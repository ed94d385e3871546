//! Arguments of `kubectl ballast`, and of the commands of `ballast` that the plugin runs on the nodes. Parsing has no side
//! effects; the doc comments of these modules are the help texts.

pub mod bpffs;
pub mod change;
pub mod check;
pub mod common;
pub mod examples;
pub mod inspect;
pub mod kubectl;
pub mod list;
pub mod observe;
pub mod on_nodes;
pub mod programmed;
pub mod top;
