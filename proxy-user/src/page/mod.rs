//! The page of one node ([`proxy_cli::page`]): its events ([`frame`]) and its history. The agent reads the maps while a page is
//! open, and for the history.

mod agent;
mod clients;
mod frame;
mod log;
mod sampler;

pub use agent::Agent;

#[cfg(test)]
mod tests;
