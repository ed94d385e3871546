//! Why bpf(2) may fail although the process has all capabilities.

use std::{fmt, fs};

use aya::maps::MapType;
use aya::sys::is_map_supported;

use proxy_core::docs;

/// The map of user ids of the initial user namespace.
const ALL_USERS: [&str; 3] = ["0", "0", "4294967295"];

/// Why bpf(2) is forbidden to a process that has all capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forbidden {
    /// The capabilities are those of a user namespace, and the kernel asks for those of the initial one.
    UserNamespace,
    /// A seccomp profile or a security module.
    Policy,
}

impl Forbidden {
    fn of(uid_map: &str) -> Self {
        let is_initial = uid_map.split_whitespace().eq(ALL_USERS);
        if is_initial { Self::Policy } else { Self::UserNamespace }
    }

    /// What to do about it.
    pub fn advice(self) -> String {
        match self {
            Self::UserNamespace => {
                "run it outside of the user namespace: not in rootless Docker, Podman or kind, and not in a pod with hostUsers: false".to_owned()
            }
            Self::Policy => {
                format!("allow bpf(2) in the profile of the container ({})", docs::page("security.md"))
            }
        }
    }
}

impl fmt::Display for Forbidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::UserNamespace => "this is a user namespace: Ballast cannot run here (rootless)",
            Self::Policy => "a seccomp profile or a security module (AppArmor, SELinux) forbids bpf(2)",
        })
    }
}

/// Returns why the kernel refuses bpf(2) to this process; `None` if it does not. The process has all capabilities.
pub fn forbidden() -> Option<Forbidden> {
    let answer = is_map_supported(MapType::LpmTrie);
    let is_denied = answer.is_err_and(|error| error.io_error.raw_os_error() == Some(libc::EPERM));
    is_denied.then(|| Forbidden::of(&fs::read_to_string("/proc/self/uid_map").unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_namespace_is_recognised_by_its_map_of_users() {
        assert_eq!(Forbidden::of("         0          0 4294967295\n"), Forbidden::Policy);
        for map in ["         0       1000          1\n", "0 1000 1\n1 100000 65536\n", "0 65536 65536\n"] {
            assert_eq!(Forbidden::of(map), Forbidden::UserNamespace, "{map}");
        }
    }
}
