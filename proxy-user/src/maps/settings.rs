//! The only entry of `config`. Several parts of the agent write their own fields of it.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, PoisonError};

use proxy_common::config::NodeConfig;

use super::sys;

/// Held while the entry is read and written back.
static EDITING: Mutex<()> = Mutex::new(());

/// Reads the entry.
pub(super) fn read(config: BorrowedFd<'_>) -> io::Result<NodeConfig> {
    let (found, _) = sys::lookup::<u32, NodeConfig>(config, None, 1)?;
    found.first().map(|(_, config)| *config).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Changes fields of the entry.
pub(super) fn edit(config: BorrowedFd<'_>, change: impl FnOnce(&mut NodeConfig)) -> io::Result<()> {
    let _editing = EDITING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut entry = read(config)?;
    change(&mut entry);
    sys::update(config, &[0u32], &[entry]).map_err(|stopped| stopped.source)
}
