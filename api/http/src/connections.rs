//! Open HTTP connections, and which of them is closed when there are too many.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::task::AbortHandle;

/// All connections of a server, the oldest first.
#[derive(Debug)]
pub(crate) struct Connections {
    limit: usize,
    open: VecDeque<(Answering, AbortHandle)>,
}

/// Whether a connection has a complete request, whose answer is being made.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answering(Arc<AtomicBool>);

impl Answering {
    /// Runs the handler that makes an answer.
    pub(crate) async fn while_making<T>(&self, answer: impl Future<Output = T>) -> T {
        self.0.store(true, Ordering::Relaxed);
        let answer = answer.await;
        self.0.store(false, Ordering::Relaxed);
        answer
    }
}

impl Connections {
    pub(crate) const fn new(limit: usize) -> Self {
        Self { limit, open: VecDeque::new() }
    }

    /// Serves one more connection. With too many, the oldest that has no complete request is
    /// closed, or else the oldest.
    pub(crate) fn serve<F: Future<Output = ()> + Send + 'static>(
        &mut self,
        connection: impl FnOnce(Answering) -> F,
    ) {
        self.open.retain(|(_, task)| !task.is_finished());
        if self.open.len() >= self.limit {
            let is_waiting = |(answering, _): &(Answering, _)| !answering.0.load(Ordering::Relaxed);
            let at = self.open.iter().position(is_waiting).unwrap_or(0);
            if let Some((_, oldest)) = self.open.remove(at) {
                oldest.abort();
                tracing::debug!(limit = self.limit, "closed the oldest waiting connection");
            }
        }
        let answering = Answering::default();
        let task = tokio::spawn(connection(answering.clone()));
        self.open.push_back((answering, task.abort_handle()));
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test]
    async fn the_oldest_that_waits_makes_room_and_one_that_is_answered_does_not() {
        let mut connections = Connections::new(3);
        connections.serve(|answering| async move { answering.while_making(pending()).await });
        // It has begun to answer.
        tokio::task::yield_now().await;
        connections.serve(|_| pending());
        connections.serve(|_| pending());
        let tasks: Vec<_> = connections.open.iter().map(|(_, task)| task.clone()).collect();
        connections.serve(|_| pending());
        tokio::task::yield_now().await;
        assert_eq!(
            tasks.iter().map(AbortHandle::is_finished).collect::<Vec<_>>(),
            [false, true, false]
        );
        assert_eq!(connections.open.len(), 3);
    }
}
