//! The state of a flow of the packet path, as shown to users.

use serde::Serialize;

/// The state of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
#[serde(rename_all = "kebab-case")]
pub enum FlowState {
    /// The backend has not answered yet.
    Unreplied,
    /// The backend has answered, and the client has not acknowledged the answer.
    HalfOpen,
    /// TCP: the client has acknowledged the backend's answer. UDP: the backend has answered.
    Established,
    /// One end has sent FIN.
    Closing,
    /// Both ends have sent FIN, or one end has sent RST.
    Closed,
    /// Silent for longer than the timeout of its state; a new flow may use the entry.
    Expired,
}

impl FlowState {
    /// All states.
    pub const ALL: [Self; 6] =
        [Self::Unreplied, Self::HalfOpen, Self::Established, Self::Closing, Self::Closed, Self::Expired];

    /// Returns the word used in tables and JSON.
    pub fn label(self) -> &'static str {
        self.into()
    }
}
