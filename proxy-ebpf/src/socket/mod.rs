//! The socket path: a call's address is translated once, at connect or at each message, and translated back when the
//! application asks who its peer is. What becomes of its connection is noted, and its close ends what is counted.

pub mod bind;
pub mod call;
pub mod outcome;
pub mod peer;
pub mod release;
pub mod sockaddr;
