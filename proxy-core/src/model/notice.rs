//! Notices that the agent sends to the cluster as Kubernetes Events.

use super::ServiceName;

/// The object that a notice is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// This node.
    Node,
    /// A Service.
    Service(ServiceName),
}

/// One notice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The object that it is about.
    pub about: Subject,
    /// Whether an operator should examine it: the Event has the type `Warning`.
    pub warning: bool,
    /// The reason: one word for machines.
    pub reason: &'static str,
    /// The action during which it happened.
    pub action: &'static str,
    /// A text for people: what happened.
    pub note: String,
}

impl Notice {
    /// Returns the notice that the agent starts; kube-proxy calls it the birth cry.
    pub const fn starting() -> Self {
        Self {
            about: Subject::Node,
            warning: false,
            reason: "Starting",
            action: "StartKubeProxy",
            note: String::new(),
        }
    }

    /// Returns the notice of which uplinks run the XDP program, and why the others do not.
    pub const fn xdp(warning: bool, note: String) -> Self {
        Self { about: Subject::Node, warning, reason: "XDPUplinks", action: "Attach", note }
    }

    /// Returns the notice that a server of the agent cannot listen.
    pub const fn no_server(reason: &'static str, note: String) -> Self {
        Self { about: Subject::Node, warning: true, reason, action: "StartKubeProxy", note }
    }

    /// Returns the notice that the agent cannot listen on the `healthCheckNodePort` of a Service.
    pub const fn no_health_check(service: ServiceName, note: String) -> Self {
        Self {
            about: Subject::Service(service),
            warning: true,
            reason: "FailedToStartServiceHealthcheck",
            action: "Listen",
            note,
        }
    }

    /// Returns the notice that a part of a Service is not programmed. kube-proxy has no Event for that.
    pub const fn not_programmed(service: ServiceName, note: String) -> Self {
        Self {
            about: Subject::Service(service),
            warning: true,
            reason: "NotProgrammed",
            action: "Program",
            note,
        }
    }
}
