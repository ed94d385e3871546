//! Kubernetes' objects in protobuf, which API servers write and we read with less work than JSON.

pub mod envelope;
mod messages;
pub mod wire;

#[cfg(test)]
mod tests;
