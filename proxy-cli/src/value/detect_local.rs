//! How pods of this node are recognized.

use serde::Serialize;

/// How pods of this node are recognized, with kube-proxy's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::EnumString, strum::IntoStaticStr)]
pub enum DetectLocalMode {
    /// By their addresses: `--cluster-cidr`.
    #[serde(rename = "ClusterCIDR")]
    #[strum(serialize = "ClusterCIDR")]
    ClusterCidr,
    /// By their addresses: the Node's podCIDRs.
    #[serde(rename = "NodeCIDR")]
    #[strum(serialize = "NodeCIDR")]
    NodeCidr,
    /// By their bridge: `--pod-bridge-interface`.
    BridgeInterface,
    /// By their devices' names: `--pod-interface-name-prefix`.
    InterfaceNamePrefix,
}

impl DetectLocalMode {
    /// Returns kube-proxy's name of the mode.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns the mode with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        name.parse().ok()
    }
}
