//! `blockd receive --listen`: streams that come over TCP.

use std::io::{BufReader, Read};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockd_api::v1::{AttachVolumeRequest, FrontEnd};
use blockd_media::clock::Clock;
use blockd_media::error::{Error, ErrorKind, shown};
use blockd_media::names::check_new_name;
use tokio::sync::{Semaphore, mpsc};

use super::super::super::{Import, blocking, interruptible};
use super::super::{Answer, Apply, human};
use super::{Prepared, Receive, Receiver, position};
use crate::transfer::increment::{Header, Reader};
use crate::transfer::link::{Hello, Incoming, Link, Listener, Reply, Shared, lock};
use crate::transfer::{Stop, interrupted};
use crate::{Context, answers, names};

/// Bytes that are read from a connection at once: most records have as many.
const BUFFER_BYTES: usize = 256 << 10;

/// Senders that may be at their beginning, each with a thread and for up to 10 s, or wait for their
/// turn, at one time: more than a receiver has, and few enough for the descriptors of a process.
const MAX_BEGINNING: usize = 64;

/// How often a sender that waits for its turn is looked at: one that closes frees its place then.
const LOOK: Duration = Duration::from_secs(1);

/// A sender that has begun.
struct Begun {
    link: Link,
    hello: Hello,
}

/// Receives streams until a signal comes, or one is whole and `--once` is given.
pub(super) async fn run(
    asked: &Receive,
    address: &str,
    sync_bytes: u64,
    context: &Context,
) -> Result<(), Error> {
    // An error of the daemon is reported before a sender connects.
    context.client().await?;
    let stop = Arc::new(Stop::default());
    // A signal ends it in order from the line that says so on.
    let bound = async { Listener::bind(address, asked.tls.clone()) };
    let listener = Arc::new(interruptible(&stop, bound).await?);
    eprintln!("blockd: waiting for senders at {}", listener.address()?);
    let (sender, mut senders) = mpsc::channel(1);
    tokio::spawn(accept(listener, Arc::clone(&stop), sender));
    loop {
        let next = interruptible(&stop, async { Ok(senders.recv().await) }).await?;
        let Some(begun) = next.filter(|_| stop.check().is_ok()) else {
            // With --once the end is success only once a stream has come.
            return if asked.once { Err(interrupted()) } else { Ok(()) };
        };
        let peer = begun.link.peer().to_owned();
        match serve(asked, begun, sync_bytes, context, &stop).await {
            Ok(()) if asked.once => return Ok(()),
            Ok(()) => {}
            Err(error) => eprintln!("blockd: error: sender {peer}: {error}"),
        }
    }
}

/// Accepts senders until it is stopped. One that does not begin holds up none of the others.
async fn accept(listener: Arc<Listener>, stop: Arc<Stop>, begun: mpsc::Sender<Begun>) {
    let places = Arc::new(Semaphore::new(MAX_BEGINNING));
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        let (at, stop_there) = (Arc::clone(&listener), Arc::clone(&stop));
        match blocking(move || at.accept(&stop_there)).await {
            Ok(link) => {
                let begun = begun.clone();
                tokio::spawn(async move {
                    begin(link, begun).await;
                    drop(place);
                });
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => return,
            // One connection that failed says nothing about the next.
            Err(error) => eprintln!("blockd: error: {error}"),
        }
    }
}

/// Waits until a sender begins, and passes it on.
async fn begin(mut link: Link, begun: mpsc::Sender<Begun>) {
    let peer = link.peer().to_owned();
    let read = blocking(move || match link.hello() {
        Ok(hello) => Ok(Begun { link, hello }),
        // There is none to answer.
        Err(error) if matches!(error.kind(), ErrorKind::Io | ErrorKind::Interrupted) => Err(error),
        Err(error) => {
            let shown = Error::Remote(error.detail());
            let _ = link.answer(&Reply::Refused(error));
            Err(shown)
        }
    });
    let queued = match read.await {
        Ok(sender) => queue(sender, &begun).await,
        Err(error) => Err(error),
    };
    match queued {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::Interrupted => {}
        Err(error) => eprintln!("blockd: error: sender {peer}: {error}"),
    }
}

/// Passes a sender on once there is room for it, unless it closes its connection meanwhile.
async fn queue(sender: Begun, begun: &mpsc::Sender<Begun>) -> Result<(), Error> {
    let mut room = std::pin::pin!(begun.reserve());
    loop {
        tokio::select! {
            room = &mut room => {
                // Once streams are not served any more, its connection ends.
                let _ = room.map(|room| room.send(sender));
                return Ok(());
            }
            () = tokio::time::sleep(LOOK) => sender.link.check_open()?,
        }
    }
}

/// Receives one stream, and answers its sender.
async fn serve(
    asked: &Receive,
    Begun { link, hello }: Begun,
    sync_bytes: u64,
    context: &Context,
    stop: &Arc<Stop>,
) -> Result<(), Error> {
    // The hidden volume may be another stream's by now.
    link.check_open()?;
    let link = Arc::new(Mutex::new(link));
    let (reply, done) = match receive(asked, &link, hello, sync_bytes, context, stop).await {
        Ok(done) => (Reply::Done, Ok(done)),
        // No refusal: without an answer the sender connects again, and goes on from here.
        Err(error) if lock(&link).is_cut() || stop.check().is_err() => return Err(error),
        Err(error) => {
            let shown = Error::Remote(error.detail());
            (Reply::Refused(error), Err(shown))
        }
    };
    // A sender that is gone does not change what was received.
    let _ = blocking(move || lock(&link).answer(&reply)).await;
    let (answer, import) = done?;
    context.output.either(&answer, || human(&answer, &import, context))
}

async fn receive(
    asked: &Receive,
    link: &Shared,
    hello: Hello,
    sync_bytes: u64,
    context: &Context,
    stop: &Arc<Stop>,
) -> Result<(Answer, Import), Error> {
    let clock = Clock::start();
    let name = match &asked.name {
        Some(name) => name.clone(),
        None => hello.name,
    };
    check_new_name(&name).map_err(|allowed| Error::invalid("name", shown(&name), allowed))?;
    names::check_visible(&name)?;
    let source = lock(link).peer().into();
    let import = Import::backup(source, name, asked.pool.clone(), asked.reconnect);
    let apply = Apply::begin(&import, context, hello.header.clone()).await?;
    let mut receiver = Receiver::new(apply, sync_bytes, !context.output.is_json()).await?;
    receiver.keep = asked.keep;
    let mut answer = match receiver.prepare().await? {
        Prepared::Done(volume, marker) => receiver.apply.answer(volume, Some(marker), &clock),
        Prepared::Hidden(hidden) => {
            let from_bytes = position(&hidden).map_or(0, |position| position.offset);
            let input = begun(link, from_bytes, hello.header, stop).await?;
            receiver.take(hidden, input, stop, &clock).await?
        }
    };
    if hello.attach {
        let request = AttachVolumeRequest {
            name: answer.volume.name.clone(),
            pool: answer.volume.pool.clone(),
            front_end: FrontEnd::Nbd.into(),
            ..Default::default()
        };
        let attached = receiver.apply.client.attach_volume(request).await?.volume;
        answer.volume = answers::volume(attached)?;
    }
    drop(receiver);
    Ok((answer, import))
}

/// Has the sender begin, and reads the header of its stream, which has to be the announced one.
async fn begun(
    link: &Shared,
    from_bytes: u64,
    announced: Header,
    stop: &Arc<Stop>,
) -> Result<super::Input, Error> {
    let link = Arc::clone(link);
    let begin = blocking(move || {
        let name = format!("the stream of {}", lock(&link).peer());
        lock(&link).answer(&Reply::Send(from_bytes))?;
        let input: Box<dyn Read + Send> =
            Box::new(BufReader::with_capacity(BUFFER_BYTES, Incoming::new(&link)));
        let input = Reader::begin(input, &name)?;
        let header =
            Header { from_bytes, is_compressed: input.header().is_compressed, ..announced };
        if *input.header() != header {
            let problem = "is another one than was announced".to_owned();
            return Err(Error::Corrupt { what: name, problem });
        }
        Ok(input)
    });
    interruptible(stop, begin).await
}
