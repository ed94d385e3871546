//! How pods of this node are recognized.

use serde::Serialize;

/// How pods of this node are recognized, with kube-proxy's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum DetectLocalMode {
    /// By their addresses: `--cluster-cidr`.
    #[serde(rename = "ClusterCIDR")]
    ClusterCidr,
    /// By their addresses: the Node's podCIDRs.
    #[serde(rename = "NodeCIDR")]
    NodeCidr,
    /// By their bridge: `--pod-bridge-interface`.
    BridgeInterface,
    /// By their devices' names: `--pod-interface-name-prefix`.
    InterfaceNamePrefix,
}

impl DetectLocalMode {
    /// All modes.
    pub const ALL: [Self; 4] =
        [Self::ClusterCidr, Self::NodeCidr, Self::BridgeInterface, Self::InterfaceNamePrefix];

    /// Returns kube-proxy's name of the mode.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ClusterCidr => "ClusterCIDR",
            Self::NodeCidr => "NodeCIDR",
            Self::BridgeInterface => "BridgeInterface",
            Self::InterfaceNamePrefix => "InterfaceNamePrefix",
        }
    }

    /// Returns the mode with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }
}
