//! What the cluster is told of single objects.

use tokio::sync::{mpsc, watch};

use crate::model::ServiceName;
use crate::model::notice::Notice;
use crate::plan::Problem;
use crate::sync::{Status, problems_begun};

/// Tells of problems of Services when they begin. A queue that is full loses some; the log has them all.
pub async fn tell_problems(mut status: watch::Receiver<Status>, sender: mpsc::Sender<Notice>) {
    let mut before: Vec<Problem> = Vec::new();
    loop {
        let after = status.borrow_and_update().problems.clone();
        if after != before {
            for problem in problems_begun(&before, &after) {
                if let Some(notice) = notice(problem) {
                    let _ = sender.try_send(notice);
                }
            }
            before = after;
        }
        if status.changed().await.is_err() {
            return;
        }
    }
}

/// Problems of slices are told to nobody: few look at events of what a controller makes.
fn notice(problem: &Problem) -> Option<Notice> {
    let (namespace, name) = problem.object.strip_prefix("Service ")?.split_once('/')?;
    let note = format!("{}: {}", problem.field, problem.message);
    Some(Notice::not_in_force(ServiceName::new(namespace, name), note))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(object: &str) -> Problem {
        Problem { object: object.to_owned(), field: "spec.ports".to_owned(), message: "no room".to_owned() }
    }

    #[tokio::test]
    async fn a_problem_of_a_service_is_told_when_it_begins() {
        let status = watch::Sender::new(Status::default());
        let (sender, mut told) = mpsc::channel(8);
        let task = tokio::spawn(tell_problems(status.subscribe(), sender));
        let problems = vec![problem("EndpointSlice shop/a-1"), problem("Service shop/a")];
        status.send_modify(|status| status.problems.clone_from(&problems));
        let expected = Notice::not_in_force(ServiceName::new("shop", "a"), "spec.ports: no room".to_owned());
        assert_eq!(told.recv().await, Some(expected));
        // The same once more, and then another one, which is all that is heard of.
        status.send_modify(|status| status.services += 1);
        tokio::task::yield_now().await;
        status.send_modify(|status| status.problems.push(problem("Service shop/b")));
        let next = told.recv().await.unwrap();
        assert_eq!(next.about, crate::model::notice::Subject::Service(ServiceName::new("shop", "b")));
        drop(status);
        task.await.unwrap();
    }
}
