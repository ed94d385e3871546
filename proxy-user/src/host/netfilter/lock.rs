//! Locks between the processes of a network namespace: tables of nftables without chains, which touch no packet.
//!
//! Only a process with `CAP_NET_ADMIN` in the namespace can create a table, and the kernel removes it with its owner. A file
//! such as that of the namespace, a cgroup or an abstract socket can be locked or bound by every process that sees it.

use rtnetlink::packet_core::NLM_F_ACK;
use rtnetlink::sys::Socket;

use super::message::{self, IPV4, Message, find, transact_by};
use super::rules::{CREATE, TABLE_OWNER, delete_table, get_table, new_own_table};
use crate::host::netlink::Netlink;

/// The lock of a name, held until this is dropped; without a socket, it locks nothing.
#[derive(Debug)]
pub struct Lock(Option<(Socket, String)>);

impl Drop for Lock {
    fn drop(&mut self) {
        if let Some((socket, name)) = &self.0 {
            // Closing is not enough: a child between fork and exec has the socket too. If this fails, the close that follows
            // releases the lock.
            let _ = transact_by(socket, &[(delete_table(IPV4, name), 0)]);
        }
    }
}

/// Takes the lock of this name in the network namespace of the calling thread, which needs `CAP_NET_ADMIN`; `None` if another
/// process has it. A kernel without nftables has no such locks: nothing is locked, and the log says so.
pub fn lock(name: &str) -> Option<Lock> {
    let create = (new_own_table(IPV4, name), CREATE);
    match message::open().and_then(|socket| transact_by(&socket, &[create]).map(|()| socket)) {
        Ok(socket) => Some(Lock(Some((socket, name.to_owned())))),
        // The kernel refuses to change the table of another socket; a security module may refuse for other reasons.
        Err(error) if error.raw_os_error() == Some(libc::EPERM) && is_held(name) => None,
        Err(error) => {
            tracing::warn!(name, %error, "cannot create a table of nftables that locks out a second agent with another --bpffs");
            Some(Lock(None))
        }
    }
}

/// Whether another process has the lock of this name; false if that is not known.
pub fn is_held(name: &str) -> bool {
    let answers = Netlink::to(message::PROTOCOL)
        .and_then(|mut netlink| netlink.exchange::<_, Message>(get_table(IPV4, name), NLM_F_ACK));
    answers.is_ok_and(|answers| answers.iter().any(|table| find(&table.body, TABLE_OWNER).is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::netfilter::message::transact;
    use crate::host::netfilter::rules::new_table;

    /// Runs the action in its own network namespace.
    fn isolated(action: impl FnOnce() + Send + 'static) {
        let run = || {
            // SAFETY: only this short-lived thread changes its namespace.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
            action();
        };
        std::thread::spawn(run).join().unwrap();
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn held_lock_excludes_another_holder() {
        isolated(|| {
            let held = lock("one");
            assert!(held.as_ref().is_some_and(|lock| lock.0.is_some()));
            assert!(lock("one").is_none() && is_held("one") && !is_held("two"));
            isolated(|| assert!(!is_held("one")));
            drop(held);
            assert!(!is_held("one"));
        });
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn dropped_lock_with_duplicated_socket_is_released() {
        isolated(|| {
            let held = lock("one").unwrap();
            let (socket, _) = held.0.as_ref().unwrap();
            let of_a_child = rustix::io::dup(socket).unwrap();
            drop(held);
            assert!(!is_held("one"));
            drop(of_a_child);
        });
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn a_table_without_an_owner_locks_nothing() {
        isolated(|| {
            transact(&[(new_table(IPV4, "one"), CREATE)]).unwrap();
            assert!(!is_held("one"));
            assert!(lock("one").is_some_and(|lock| lock.0.is_none()), "the agent starts without the lock");
        });
    }
}
