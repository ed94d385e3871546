//! Owns the tasks of the agent.
//!
//! The agent exits when a task that it needs ends, when a task fails, and when a thread panics: programs and maps stay
//! in place, and kubelet or systemd starts the agent again. An agent that continues without one of its tasks would look
//! healthy and do nothing.

use std::panic;

use anyhow::anyhow;
use tokio::task::JoinSet;

/// The exit status after a panic, as in the Rust runtime.
const PANICKED: i32 = 101;

/// The tasks of the agent; they are cancelled when the supervisor is dropped.
#[derive(Debug, Default)]
pub struct Supervisor {
    tasks: JoinSet<anyhow::Result<()>>,
}

impl Supervisor {
    /// Runs a task that must not end before the agent does.
    pub fn spawn_required(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(async move {
            task.await;
            Err(anyhow!("the task `{name}` ended, and the agent cannot run without it"))
        });
    }

    /// Runs a task that may end, but whose error ends the agent.
    pub fn spawn_fallible(&mut self, task: impl Future<Output = anyhow::Result<()>> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// Runs a task that may end.
    pub fn spawn_optional(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(async move {
            task.await;
            Ok(())
        });
    }

    /// Waits for the first failure of a task.
    pub async fn failed(&mut self) -> anyhow::Error {
        while let Some(ended) = self.tasks.join_next().await {
            match ended {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return error,
                Err(error) => return anyhow!(error).context("a task was interrupted"),
            }
        }
        std::future::pending().await
    }
}

/// Exits the process when any of its threads panics, after the message was logged. The async runtime would end only the
/// task, and a release build, which does not unwind, would abort.
pub fn end_on_panic() {
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        report(info);
        tracing::error!(
            panic = %info,
            "this is a bug in Ballast, please report it; exiting; programs and maps stay in place"
        );
        std::process::exit(PANICKED);
    }));
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use tokio::time::{sleep, timeout};

    use super::*;

    /// Much longer than the process takes until the panic.
    const LATE: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn a_task_that_is_needed_and_ends_is_a_failure() {
        let mut tasks = Supervisor::default();
        tasks.spawn_required("driver", sleep(Duration::from_millis(10)));
        let error = tasks.failed().await;
        assert!(error.to_string().starts_with("the task `driver` ended"), "{error}");
    }

    #[tokio::test]
    async fn optional_task_may_end_but_an_error_of_a_fallible_task_is_a_failure() {
        let mut tasks = Supervisor::default();
        tasks.spawn_optional(async {});
        tasks.spawn_fallible(async { Ok(()) });
        assert!(timeout(Duration::from_millis(50), tasks.failed()).await.is_err());
        tasks.spawn_fallible(async { Err(anyhow!("the address is taken")) });
        assert_eq!(tasks.failed().await.to_string(), "the address is taken");
    }

    /// Tells the test below that it runs in a child process.
    const CHILD: &str = "BALLAST_TEST_PANICS";

    fn panics_in_a_task() {
        end_on_panic();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.spawn(async { panic!("for Service default/web") });
        std::thread::sleep(LATE);
    }

    #[test]
    fn a_panic_in_a_task_ends_the_process() {
        if std::env::var_os(CHILD).is_some() {
            return panics_in_a_task();
        }
        let mut child = Command::new(std::env::current_exe().unwrap());
        let name = "app::supervisor::tests::a_panic_in_a_task_ends_the_process";
        let output = child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(PANICKED), "{said}");
        assert!(said.contains("for Service default/web"), "{said}");
    }
}
