//! Network namespaces without names: the kernel removes one with its last process and descriptor, even after a SIGKILL.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

/// A network namespace.
pub struct Space {
    name: &'static str,
    file: File,
}

impl Space {
    /// Creates a namespace, with its loopback device up and forwarding enabled.
    pub fn new(name: &'static str) -> Result<Self> {
        let make = || {
            // SAFETY: only this short-lived thread changes its namespace.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                return Err(io::Error::last_os_error());
            }
            File::open("/proc/thread-self/ns/net")
        };
        let file = std::thread::scope(|scope| scope.spawn(make).join());
        let file =
            file.map_err(|_| anyhow::anyhow!("a thread died"))?.context("cannot make a network namespace")?;
        let space = Self { name, file };
        space.ip("link set lo up")?;
        for family in ["ipv4", "ipv6"] {
            space.sysctl(&format!("net/{family}/conf/all/forwarding"), "1")?;
        }
        // A device sends no neighbour solicitation until duplicate address detection of its link-local address has
        // ended: the SYN of a first connection would be lost, which costs one second.
        space.sysctl("net/ipv6/conf/default/accept_dad", "0")?;
        Ok(space)
    }

    /// Returns the path by which `ip` names the namespace.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// Returns a command that will run inside the namespace.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        let space = self.file.as_raw_fd();
        // SAFETY: `enter` makes one system call, which is allowed between fork and exec.
        unsafe { command.pre_exec(move || enter(space)) };
        command
    }

    /// Runs these lines with `ip -batch`.
    pub fn ip(&self, lines: &str) -> Result<()> {
        let mut command = self.command("ip");
        command.args(["-batch", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot run ip")?;
        child.stdin.take().context("ip has no input")?.write_all(lines.as_bytes())?;
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!("ip in {}: {}\n{lines}", self.name, String::from_utf8_lossy(&output.stderr));
        }
        Ok(())
    }

    /// Connects this namespace to another one by a veth pair: `device` here (.1), and eth0 there (.2), which gets the
    /// default routes. `device` has an address without a subnet, and a route, as CNI plugins configure it, so that it
    /// is not a NIC with a network of its own.
    pub fn join(&self, other: &Self, device: &str, v4: &str, v6: &str) -> Result<()> {
        self.ip(&format!(
            "link add {device} type veth peer name eth0 netns {}\n\
             addr add {v4}.1/32 dev {device}\n\
             addr add {v6}:1/128 dev {device} nodad\n\
             link set {device} up\n\
             route add {v4}.0/24 dev {device}\n\
             route add {v6}:/64 dev {device}\n",
            other.path()
        ))?;
        other.ip(&format!(
            "addr add {v4}.2/24 dev eth0\n\
             addr add {v6}:2/64 dev eth0 nodad\n\
             link set eth0 up\n\
             route add default via {v4}.1\n\
             route add default via {v6}:1\n"
        ))
    }

    /// Sets a sysctl of the namespace; `name` is a path below `/proc/sys`.
    pub fn sysctl(&self, name: &str, value: &str) -> Result<()> {
        self.inside(|| std::fs::write(format!("/proc/sys/{name}"), value).with_context(|| name.to_owned()))
    }

    /// Returns another handle of the same namespace.
    pub fn try_clone(&self) -> Result<Self> {
        Ok(Self { name: self.name, file: self.file.try_clone()? })
    }

    /// Runs the action on a thread inside the namespace.
    pub fn inside<T: Send>(&self, action: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let space = self.file.as_raw_fd();
        let run = || {
            enter(space).context("cannot enter a network namespace")?;
            action()
        };
        std::thread::scope(|scope| scope.spawn(run).join()).map_err(|_| anyhow::anyhow!("a thread died"))?
    }
}

fn enter(space: RawFd) -> io::Result<()> {
    // SAFETY: the call changes nothing but the calling thread's namespace.
    if unsafe { libc::setns(space, libc::CLONE_NEWNET) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
