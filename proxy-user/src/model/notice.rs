//! Something that the cluster should be told: an event, in Kubernetes' word.

use super::ServiceName;

/// What a notice is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// This node.
    Node,
    /// A Service.
    Service(ServiceName),
}

/// What to tell about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// What it is about.
    pub about: Subject,
    /// An operator should look at it.
    pub warning: bool,
    /// One word for machines.
    pub reason: &'static str,
    /// What was being done.
    pub action: &'static str,
    /// What happened, for people.
    pub note: String,
}

impl Notice {
    /// The agent begins: what kube-proxy calls its birth cry.
    pub const fn starting() -> Self {
        Self {
            about: Subject::Node,
            warning: false,
            reason: "Starting",
            action: "StartKubeProxy",
            note: String::new(),
        }
    }

    /// Which uplinks run the XDP program, and why the others do not.
    pub const fn xdp(warning: bool, note: String) -> Self {
        Self { about: Subject::Node, warning, reason: "XDPUplinks", action: "Attach", note }
    }

    /// A server of the agent cannot listen.
    pub const fn no_server(reason: &'static str, note: String) -> Self {
        Self { about: Subject::Node, warning: true, reason, action: "StartKubeProxy", note }
    }

    /// The `healthCheckNodePort` of a Service cannot be listened at.
    pub const fn no_health_check(service: ServiceName, note: String) -> Self {
        Self {
            about: Subject::Service(service),
            warning: true,
            reason: "FailedToStartServiceHealthcheck",
            action: "Listen",
            note,
        }
    }

    /// A part of a Service is not programmed. kube-proxy has no event for that.
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
