//! The socket path: the address of a call is translated once, at connect or at each message, and translated back when the
//! application asks for its peer. The result of a connection is noted, and its close ends its count as an open connection.

pub mod bind;
pub mod call;
pub mod client;
pub mod outcome;
pub mod peer;
pub mod release;
pub mod unconnected;
