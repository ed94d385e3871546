//! The node that the agent runs on.

/// What is known of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeView {
    /// Its name, as endpoints name it in `nodeName`.
    pub name: String,
    /// Its zone, the label `topology.kubernetes.io/zone`; never empty.
    pub zone: Option<String>,
    /// It is being deleted, or about to be: new traffic should go elsewhere.
    pub leaves: bool,
}

impl NodeView {
    /// A node that stays, whose zone is not known.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), zone: None, leaves: false }
    }
}
