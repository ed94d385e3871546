//! Decodes Kubernetes objects in protobuf, which is less work than JSON for API servers and for the agent.

pub mod envelope;
mod messages;
pub mod wire;

#[cfg(test)]
mod tests;
