//! Programs of a loaded object, by their names. They are loaded on two threads: the verifier takes the largest part of a start, and
//! the kernel verifies programs of different callers in parallel.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};
use std::thread;

use aya::Ebpf;
use aya::programs::{Program, ProgramError, ProgramInfo};

use super::error::Error;

/// Returns the descriptor of a loaded program.
pub(super) fn program<'a>(ebpf: &'a Ebpf, name: &'static str) -> Result<BorrowedFd<'a>, Error> {
    let program = ebpf.program(name).ok_or(Error::Incomplete { kind: "program", name })?;
    Ok(program.fd().map_err(refused(name))?.as_fd())
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
    ebpf.program(name)?.info().ok()
}

/// Threads that call the verifier, including the calling thread. The two largest programs take half of the time.
const CALLERS: usize = 2;

/// Programs to load, by name.
pub(super) type NamedPrograms<'a> = Vec<(&'static str, &'a mut Program)>;

/// Returns these programs of an object, in this order.
pub(super) fn pick(
    ebpf: &mut Ebpf,
    names: impl IntoIterator<Item = &'static str>,
) -> Result<NamedPrograms<'_>, Error> {
    let mut all: Vec<_> = ebpf.programs_mut().collect();
    let mut take = |name| {
        let at = all.iter().position(|(known, _)| *known == name);
        at.map(|at| (name, all.swap_remove(at).1)).ok_or(Error::Incomplete { kind: "program", name })
    };
    names.into_iter().map(&mut take).collect()
}

/// Loads programs; the largest should come first. Returns an error for each program that the kernel rejects.
pub(super) fn load(programs: NamedPrograms<'_>) -> Vec<Error> {
    let queue = Mutex::new(programs.into_iter());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        let loaded = std::iter::from_fn(next).map(|(name, program)| load_one(program).map_err(refused(name)));
        loaded.filter_map(Result::err).collect::<Vec<_>>()
    };
    thread::scope(|scope| {
        // Without another thread (the limit of a pids cgroup), this one loads all.
        let others: Vec<_> =
            (1..CALLERS).filter_map(|_| thread::Builder::new().spawn_scoped(scope, work).ok()).collect();
        let mut errors = work();
        errors.extend(others.into_iter().flat_map(join));
        errors
    })
}

/// Returns the result of a thread; a panic of the thread continues in the caller.
pub(super) fn join<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn load_one(program: &mut Program) -> Result<(), ProgramError> {
    match program {
        Program::CgroupSock(program) => program.load(),
        Program::CgroupSockAddr(program) => program.load(),
        Program::SockOps(program) => program.load(),
        Program::SchedClassifier(program) => program.load(),
        Program::Xdp(program) => program.load(),
        _ => Err(ProgramError::UnexpectedProgramType),
    }
}
