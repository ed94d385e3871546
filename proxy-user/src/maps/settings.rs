//! The only entry of `config`. Several parts of the agent write their own fields of it.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use proxy_common::config::NodeConfig;
use proxy_common::decide::ATTENDS_SECS;
use proxy_common::map_names;

use super::{sys, view};

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

/// Tells the programs whose maps are pinned in `folder` that an agent attaches programs to new devices, or that none does any more.
pub fn attend(folder: &Path, is_there: bool) -> io::Result<()> {
    let config = sys::pinned(folder, map_names::CONFIG)?;
    edit(config.fd().as_fd(), |entry| {
        // 0 means that no agent is there.
        let until = view::now(entry.hz).wrapping_add(ATTENDS_SECS * entry.hz) | 1;
        entry.attended_until = if is_there { until } else { 0 };
    })
}
