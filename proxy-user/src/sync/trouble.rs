//! Why a Service port is not in the maps as it should be.

use thiserror::Error;

use super::extents::NoRoom;
use super::ids::Exhausted;
use crate::maps::MapError;
use crate::model::Problem;
use crate::plan::PortId;

/// What kept a Service port from being programmed. What was there before stays.
#[derive(Debug, Error)]
pub enum Trouble {
    /// A write to a map failed.
    #[error(transparent)]
    Map(#[from] MapError),
    /// There are more Service ports than ids.
    #[error("all {} ids of Service ports are in use; raise --max-services", .0.limit)]
    Services(Exhausted),
    /// There are more endpoints than ids. Those that have one are served.
    #[error("all {} ids of endpoints are in use; raise --max-backends", .0.limit)]
    Backends(Exhausted),
    /// No part of `slots` is long enough.
    #[error("no room for {} slots: {} are free, {} of them in one piece; raise --max-slots", .0.wanted, .0.free, .0.longest)]
    Slots(NoRoom),
    /// No part of `maglev` is long enough. Without a table, a hash takes one of the slots: more connections move when endpoints
    /// change.
    #[error("no room for a Maglev table of {} words: {} are free, {} of them in one piece; raise --max-maglev-words", .0.wanted, .0.free, .0.longest)]
    Tables(NoRoom),
    /// Frontends took the room of addresses.
    #[error("the room is needed for frontends; raise --max-frontends")]
    Addresses,
    /// The names are longer than the API server allows.
    #[error("the name does not fit the names map")]
    Name,
}

impl Trouble {
    /// What went wrong, with its causes.
    pub fn text(&self) -> String {
        let mut message = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            message = format!("{message}: {error}");
            cause = error.source();
        }
        message
    }

    /// The same as a report about the Service.
    pub fn problem(&self, port: &PortId) -> Problem {
        let message = self.text();
        Problem {
            object: format!("Service {}/{}", port.namespace, port.name),
            field: if port.port.is_empty() {
                "spec.ports".to_owned()
            } else {
                format!("spec.ports[{}]", port.port)
            },
            message: format!("{} {}: {message}", port.protocol, port.family),
        }
    }
}
