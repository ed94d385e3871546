//! Programs of a loaded object, by their names.

use std::os::fd::{AsFd, BorrowedFd};

use aya::Ebpf;
use aya::programs::{Program, ProgramError, ProgramInfo};

use super::error::Error;

/// Returns the descriptor of a loaded program.
pub(super) fn program<'a>(ebpf: &'a Ebpf, name: &'static str) -> Result<BorrowedFd<'a>, Error> {
    let missing = || Error::Incomplete { kind: "program", name };
    let program = ebpf.program(name).ok_or_else(missing)?;
    let fd = match program {
        Program::CgroupSock(program) => program.fd(),
        Program::CgroupSockAddr(program) => program.fd(),
        Program::SockOps(program) => program.fd(),
        Program::SchedClassifier(program) => program.fd(),
        Program::Xdp(program) => program.fd(),
        _ => return Err(missing()),
    };
    Ok(fd.map_err(|source| Error::rejected(name, &source))?.as_fd())
}

pub(super) fn refused(name: &'static str) -> impl FnOnce(ProgramError) -> Error {
    move |source| Error::rejected(name, &source)
}

pub(super) fn program_mut<'a, P>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut P, Error>
where
    &'a mut P: TryFrom<&'a mut Program, Error = ProgramError>,
{
    let program = ebpf.program_mut(name).ok_or(Error::Incomplete { kind: "program", name })?;
    program.try_into().map_err(refused(name))
}

/// Returns the kernel's information about a program.
pub(super) fn info(ebpf: &Ebpf, name: &str) -> Option<ProgramInfo> {
    match ebpf.program(name)? {
        Program::CgroupSock(program) => program.info().ok(),
        Program::CgroupSockAddr(program) => program.info().ok(),
        Program::SockOps(program) => program.info().ok(),
        Program::SchedClassifier(program) => program.info().ok(),
        Program::Xdp(program) => program.info().ok(),
        _ => None,
    }
}
