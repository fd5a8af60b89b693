//! A minimal client, and the replies that it gets.

use blockd_nbd::codec::handshake::{
    Event, Handshake, MAX_LIST_BYTES, MAX_OPTION_BYTES, Next, Reason, Step, TlsMode,
};
use blockd_nbd::{ALLOCATED, Describes, ExportError, MetaContext, Negotiated};

use crate::{export, hex};

/// A handshake whose client says `input`: the bytes sent back, and its end. Exports are looked up
/// in `export()` alone.
pub(crate) struct Talk {
    pub(crate) handshake: Handshake,
    pub(crate) input: Vec<u8>,
    pub(crate) read: usize,
    pub(crate) output: Vec<u8>,
    pub(crate) most_asked: usize,
    /// Snapshots that the export has contexts of.
    pub(crate) snapshots: Vec<&'static str>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The server waits for more bytes than there are.
    Waiting,
    Entered(Negotiated),
    Closed(Reason),
}

impl Talk {
    pub(crate) fn new(tls: TlsMode, input: &[u8]) -> Self {
        let handshake = Handshake::new(tls);
        let (input, output) = (input.to_vec(), Vec::new());
        Self { handshake, input, read: 0, output, most_asked: 0, snapshots: vec!["mon", "tue"] }
    }

    pub(crate) fn take(&mut self, count: usize) -> Option<Vec<u8>> {
        let bytes = self.input.get(self.read..self.read + count)?.to_vec();
        self.read += count;
        Some(bytes)
    }

    pub(crate) fn run(&mut self) -> End {
        let export = export();
        let mut step = self.handshake.handle(Event::Connected);
        loop {
            let Step { send, next } = step;
            assert!(send.len() <= MAX_LIST_BYTES + 64);
            self.output.extend_from_slice(&send);
            step = match next {
                Next::Read(count) => {
                    self.most_asked = self.most_asked.max(count);
                    let Some(bytes) = self.take(count) else { return End::Waiting };
                    self.handshake.handle(Event::Bytes(&bytes))
                }
                Next::Skip(count) => {
                    assert!(count <= MAX_OPTION_BYTES);
                    if self.take(usize::try_from(count).expect("it fits")).is_none() {
                        return End::Waiting;
                    }
                    self.handshake.handle(Event::Skipped)
                }
                Next::List => self.handshake.handle(Event::Exports(std::slice::from_ref(&export))),
                Next::Open(name) => {
                    let known = ["", "web", "default/web"].contains(&name.as_str());
                    let result = if known { Ok(&export) } else { Err(&ExportError::Unknown) };
                    self.handshake.handle(Event::Opened(result))
                }
                Next::Contexts => {
                    let contexts = known_contexts(self.snapshots.iter().map(|one| (*one).into()));
                    self.handshake.handle(Event::Contexts(&contexts))
                }
                Next::StartTls => self.handshake.handle(Event::Encrypted),
                Next::Enter(agreed) => return End::Entered(agreed),
                Next::Close(reason) => return End::Closed(reason),
            };
        }
    }

    /// The types of the replies to options, with the option each answers.
    pub(crate) fn replies(&self) -> Vec<(u32, u32)> {
        let mut replies = Vec::new();
        let mut rest = &self.output[18..];
        while rest.len() >= 20 && rest[..8] == hex("0003e889045565a9")[..] {
            let number =
                |at: usize| u32::from_be_bytes(rest[at..at + 4].try_into().expect("it fits"));
            replies.push((number(8), number(12)));
            rest = &rest[20 + usize::try_from(number(16)).expect("it fits")..];
        }
        replies
    }
}

/// The contexts of the export besides `base:allocation`; the snapshots' ids count from 10.
pub(crate) fn known_contexts(snapshots: impl Iterator<Item = String>) -> Vec<MetaContext> {
    let allocated = MetaContext { name: ALLOCATED.to_owned(), describes: Describes::Allocated };
    let changed = snapshots.zip(10..).map(|(name, id)| MetaContext::changed_since(&name, id));
    std::iter::once(allocated).chain(changed).collect()
}

pub(crate) const FLAGS: [u8; 4] = [0, 0, 0, 3];

pub(crate) fn option(kind: u32, data: &[u8]) -> Vec<u8> {
    announced(kind, u32::try_from(data.len()).expect("it fits"), data)
}

pub(crate) fn announced(kind: u32, len: u32, data: &[u8]) -> Vec<u8> {
    [b"IHAVEOPT".as_slice(), &kind.to_be_bytes(), &len.to_be_bytes(), data].concat()
}

pub(crate) fn go(name: &str, items: &[u16]) -> Vec<u8> {
    let length = u32::try_from(name.len()).expect("it fits").to_be_bytes();
    let count = u16::try_from(items.len()).expect("it fits").to_be_bytes();
    let items: Vec<u8> = items.iter().flat_map(|item| item.to_be_bytes()).collect();
    [&length, name.as_bytes(), &count, &items].concat()
}

pub(crate) fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let number = |value: usize| u32::try_from(value).expect("it fits").to_be_bytes();
    let mut data = [&number(name.len()), name.as_bytes(), &number(queries.len())].concat();
    for query in queries {
        data.extend_from_slice(&number(query.len()));
        data.extend_from_slice(query.as_bytes());
    }
    data
}

pub(crate) fn talk(tls: TlsMode, parts: &[Vec<u8>]) -> (End, Talk) {
    let mut talk = Talk::new(tls, &[FLAGS.to_vec(), parts.concat()].concat());
    let end = talk.run();
    (end, talk)
}
