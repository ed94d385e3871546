//! Selection: from the original destination to the backend. The packet path and the socket path share it.

pub mod affinity;
pub mod backend;
pub mod health;
pub mod load;
pub mod lookup;
