//! Calls with many answers. The number of buffered answers is bounded, a caller that does not read
//! is cancelled, and an incomplete stream ends with an error.

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use blockd_csi_base::clock::Clock;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio_stream::Stream;
use tonic::{Code, Response, Status};

use crate::error::Error;

use super::{Call, Plugin, SLACK, Working};

/// Answers that wait for their caller. One is on its way while the next is made; more would only
/// be memory.
const WAITING: usize = 2;

/// Streams at once. A node has a few backups at a time; each stream keeps one of the daemon open.
const AT_ONCE: usize = 64;

/// Timeout of an answer that the caller does not read: as long as the daemon's own, so that a
/// caller that copies to a slow disk between reads is not cancelled.
const PATIENCE: Duration = Duration::from_secs(60);

/// The limits of streams.
#[derive(Debug)]
pub(crate) struct Streams {
    places: Arc<Semaphore>,
    patience: Duration,
    ending: watch::Sender<bool>,
}

impl Default for Streams {
    fn default() -> Self {
        Self::new(AT_ONCE, PATIENCE)
    }
}

impl Streams {
    /// With other bounds.
    pub(crate) fn new(at_once: usize, patience: Duration) -> Self {
        let places = Arc::new(Semaphore::new(at_once));
        Self { places, patience, ending: watch::Sender::new(false) }
    }
}

/// Where the work on a stream puts its answers.
#[derive(Debug)]
pub struct Sink<T> {
    send: mpsc::Sender<T>,
    patience: Duration,
}

impl<T> Sink<T> {
    /// Sends the caller an answer, as soon as there is room.
    ///
    /// # Errors
    /// The caller has gone, or does not read.
    pub async fn send(&self, answer: T) -> Result<(), Error> {
        match tokio::time::timeout(self.patience, self.send.send(answer)).await {
            Ok(sent) => sent.map_err(|_| Error::HungUp),
            Err(_) => {
                let what = format!("nothing was read for {} ms", self.patience.as_millis());
                Err(Error::GivenUp { what })
            }
        }
    }
}

/// The answers of a stream, in order, and then how it ended.
#[derive(Debug)]
pub struct Answers<T> {
    first: Option<T>,
    rest: mpsc::Receiver<T>,
    /// Receives the result of the work. `None`: it was already delivered to the caller.
    fate: Option<oneshot::Receiver<Result<(), Error>>>,
}

impl<T: Unpin> Stream for Answers<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        if let Some(answer) = ready!(self.rest.poll_recv(cx)) {
            return Poll::Ready(Some(Ok(answer)));
        }
        // Nothing comes any more: that is the end only if the work says so.
        let Some(fate) = self.fate.as_mut() else { return Poll::Ready(None) };
        let fate = ready!(Pin::new(fate).poll(cx));
        self.fate = None;
        Poll::Ready(ended(fate).err().map(|error| Err(error.into())))
    }
}

fn ended(fate: Result<Result<(), Error>, oneshot::error::RecvError>) -> Result<(), Error> {
    fate.unwrap_or_else(|_| Err(Error::unexpected("a stream", "ended in the middle")))
}

impl Plugin {
    /// Works on a call with many answers, in a task of its own that ends with the caller, or by its
    /// deadline, or when the caller does not read. Counts and logs it when it has ended.
    ///
    /// # Errors
    /// The errors of the work before its first answer, and RESOURCE_EXHAUSTED with too many
    /// streams. Later errors are the last message of the stream.
    pub async fn stream<T, F>(
        self: &Arc<Self>,
        call: Call,
        work: impl FnOnce(Sink<T>) -> F,
    ) -> Result<Response<Answers<T>>, Status>
    where
        T: Send + 'static,
        F: Future<Output = Result<(), Error>> + Send + 'static,
    {
        let (send, mut rest) = mpsc::channel(WAITING);
        let (report, fate) = oneshot::channel();
        let work = work(Sink { send: send.clone(), patience: self.streams.patience });
        let plugin = Arc::clone(self);
        let working = Working::begin(&self.working, &self.metrics);
        tokio::spawn(async move {
            let clock = Clock::start();
            let result = plugin.supervise(&call, work, &send).await;
            let time = clock.elapsed();
            let code = result.as_ref().err().map_or(Code::Ok, Error::code);
            plugin.metrics.observe(call.method, code, time);
            call.log(code, result.as_ref().err(), time);
            drop(working);
            let _ = report.send(result);
        });
        let first = rest.recv().await;
        let mut answers = Answers { first, rest, fate: Some(fate) };
        if answers.first.is_none()
            && let Some(fate) = answers.fate.take()
        {
            ended(fate.await)?;
        }
        Ok(Response::new(answers))
    }

    async fn supervise<T>(
        &self,
        call: &Call,
        work: impl Future<Output = Result<(), Error>>,
        caller: &mpsc::Sender<T>,
    ) -> Result<(), Error> {
        let Ok(_place) = Arc::clone(&self.streams.places).try_acquire_owned() else {
            return Err(Error::Busy { what: "streams" });
        };
        let mut ending = self.streams.ending.subscribe();
        tokio::select! {
            result = work => result,
            () = caller.closed() => Err(Error::HungUp),
            error = late(call.deadline) => Err(error),
            _ = ending.wait_for(|ending| *ending) => {
                let problem = "this plugin is about to end".to_owned();
                Err(Error::Unavailable { address: self.daemon.address(), problem })
            }
        }
    }

    /// Ends all streams with an error, since their duration has no bound.
    pub fn end_streams(&self) {
        self.streams.ending.send_replace(true);
    }
}

/// Resolves with the error of a stream at its deadline; never, without one.
async fn late(deadline: Option<Duration>) -> Error {
    let Some(limit) = deadline else { return pending().await };
    tokio::time::sleep(limit.saturating_sub(SLACK.min(limit / 4))).await;
    Error::GivenUp { what: format!("not all was read within {} ms", limit.as_millis()) }
}
