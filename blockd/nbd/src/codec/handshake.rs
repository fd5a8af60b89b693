//! The handshake before the transmission phase, as a state machine without IO.
//!
//! The driver executes each `Step`: it sends, then does the next action, then passes the result as
//! an `Event`. It reads exactly the requested number of bytes, so that none of the next phase, or
//! of TLS, are swallowed.
//!
//! An option that can be refused by its header is refused before its data is read, so that the
//! server does not wait for bytes that a client announced and does not send.

mod options;

use super::super::{ExportError, ExportInfo, MetaContext, Negotiated, Selected};
use super::option::{self, Malformed, Queries, Wanted};
use super::{INIT_MAGIC, MAX_STRING_BYTES, OPTION_MAGIC, greeting, opt, rep, u32_at};

/// The longest data of an option that is read. The largest of sense are the metadata queries:
/// a name, and 64 queries that are hardly ever longer than 20 bytes.
pub const MAX_OPTION_BYTES: u32 = 64 << 10;

/// The most options in one handshake. A client that requests details of each export of a list needs
/// three for each.
pub const MAX_OPTIONS: u32 = 4096;

/// The longest reply to LIST; exports that do not fit are left out, and the reply notes that.
pub const MAX_LIST_BYTES: usize = 1 << 20;

/// The most contexts of a list that name a snapshot: the newest. An export may have thousands, and
/// a client requests an older one by name.
pub const MAX_LISTED_SNAPSHOTS: usize = 256;

/// A listener's mode of TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsMode {
    /// There is none.
    #[default]
    Off,
    /// TLS is optional for clients.
    On,
    /// Nothing is said and no export given without it.
    Required,
}

/// The result of the last step.
#[derive(Debug)]
pub enum Event<'a> {
    /// The connection is there.
    Connected,
    /// The bytes of a `Read`: exactly the requested number.
    Bytes(&'a [u8]),
    /// The bytes of a `Skip` are dropped.
    Skipped,
    /// The exports of a `List`.
    Exports(&'a [ExportInfo]),
    /// The result of an `Open`.
    Opened(Result<&'a ExportInfo, &'a ExportError>),
    /// The contexts of a `Contexts`.
    Contexts(&'a [MetaContext]),
    /// TLS is up; everything from now on goes through it.
    Encrypted,
}

/// Send, then do what is next.
#[derive(Debug, PartialEq, Eq)]
pub struct Step {
    pub send: Vec<u8>,
    pub next: Next,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Read exactly this many bytes.
    Read(usize),
    /// Read this many bytes and drop them.
    Skip(u32),
    /// Make a list of the exports.
    List,
    /// Look for the export of that name.
    Open(String),
    /// Say which metadata contexts the export has that was opened last.
    Contexts,
    /// Begin TLS as its server.
    StartTls,
    /// The handshake is done; the export is the one that was opened last.
    Enter(Negotiated),
    /// Close the connection.
    Close(Reason),
}

/// Why a connection ended before it was of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    #[error("the client is done")]
    Aborted,
    #[error("the client set flags that were not offered: {0:#x}")]
    ClientFlags(u32),
    #[error("the client does not speak fixed newstyle, and TLS is required")]
    NotFixed,
    #[error("an option did not begin with the option magic")]
    OptionMagic,
    #[error("option {0} announced {1} bytes")]
    OptionTooLong(u32, u32),
    #[error("more than {MAX_OPTIONS} options")]
    TooManyOptions,
    #[error("EXPORT_NAME can't be granted: {0}")]
    ExportName(&'static str),
    #[error("unexpected reply: not an answer to the option that was sent")]
    OutOfStep,
}

/// A handshake, from the server's side.
#[derive(Debug)]
pub struct Handshake {
    tls_mode: TlsMode,
    state: State,
    options: u32,
    no_zeroes: bool,
    fixed: bool,
    agreed: Agreed,
    encrypted: bool,
}

/// The result of the options so far; TLS resets it.
#[derive(Debug, Default)]
struct Agreed {
    structured: bool,
    extended: bool,
    /// The own name of the export for which contexts were selected, and these.
    contexts: Option<(String, Vec<Selected>)>,
}

#[derive(Debug)]
enum State {
    Connecting,
    ClientFlags,
    OptionHeader,
    /// Data is skipped; the reply was sent.
    Skipping,
    /// The 4 bytes of the name's length.
    NameLen(option::Header),
    /// The data after the header, with this many bytes.
    Data(option::Header, u32),
    ExportName,
    Abort,
    Listing,
    Opening(Asking),
    /// The contexts of the export of that name are looked for.
    Describing {
        option: u32,
        queries: Queries,
        export: String,
    },
    Encrypting,
    Ended,
}

/// The purpose for which an export is opened.
#[derive(Debug)]
enum Asking {
    ExportName,
    Info { option: u32, wanted: Wanted },
    Contexts { option: u32, queries: Queries },
}

impl Handshake {
    #[must_use]
    pub fn new(tls_mode: TlsMode) -> Self {
        Self {
            tls_mode,
            state: State::Connecting,
            options: 0,
            no_zeroes: false,
            fixed: false,
            agreed: Agreed::default(),
            encrypted: false,
        }
    }

    /// The next step.
    pub fn handle(&mut self, event: Event<'_>) -> Step {
        match (std::mem::replace(&mut self.state, State::Ended), event) {
            (State::Connecting, Event::Connected) => self.greet(),
            (State::ClientFlags, Event::Bytes(bytes)) => self.client_flags(bytes),
            (State::OptionHeader, Event::Bytes(bytes)) => self.option_header(bytes),
            (State::Skipping, Event::Skipped) => self.next_option(Vec::new()),
            (State::NameLen(option), Event::Bytes(bytes)) => {
                self.name_len(option, option::name_len(bytes))
            }
            (State::Data(option, name_len), Event::Bytes(bytes)) => {
                self.data(option, name_len, bytes)
            }
            (State::ExportName, Event::Bytes(bytes)) => match option::name(bytes) {
                Ok(name) => self.open(name, Asking::ExportName),
                Err(Malformed { message, .. }) => close(Reason::ExportName(message)),
            },
            (State::Abort, Event::Skipped) => acknowledge_abort(),
            (State::Listing, Event::Exports(exports)) => self.list(exports),
            (State::Opening(asking), Event::Opened(result)) => self.opened(asking, result),
            (State::Describing { option, queries, export }, Event::Contexts(contexts)) => {
                self.contexts(option, &queries, export, contexts)
            }
            (State::Encrypting, Event::Encrypted) => {
                // Options agreed in the clear may have been forged (CVE-2021-3716).
                self.agreed = Agreed::default();
                self.encrypted = true;
                self.next_option(Vec::new())
            }
            _ => close(Reason::OutOfStep),
        }
    }

    fn greet(&mut self) -> Step {
        let mut send = INIT_MAGIC.to_be_bytes().to_vec();
        send.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
        let flags = greeting::FIXED_NEWSTYLE | greeting::NO_ZEROES;
        send.extend_from_slice(&flags.to_be_bytes());
        self.state = State::ClientFlags;
        Step { send, next: Next::Read(4) }
    }

    fn client_flags(&mut self, bytes: &[u8]) -> Step {
        let Some(flags) = u32_at(bytes, 0) else { return close(Reason::OutOfStep) };
        let known = u32::from(greeting::FIXED_NEWSTYLE | greeting::NO_ZEROES);
        if flags & !known != 0 {
            return close(Reason::ClientFlags(flags));
        }
        self.fixed = flags & u32::from(greeting::FIXED_NEWSTYLE) != 0;
        self.no_zeroes = flags & u32::from(greeting::NO_ZEROES) != 0;
        if !self.fixed && self.tls_mode == TlsMode::Required {
            return close(Reason::NotFixed);
        }
        self.next_option(Vec::new())
    }

    fn next_option(&mut self, send: Vec<u8>) -> Step {
        self.state = State::OptionHeader;
        Step { send, next: Next::Read(option::HEADER_BYTES) }
    }

    fn option_header(&mut self, bytes: &[u8]) -> Step {
        let Some(option) = option::parse_header(bytes) else {
            return close(Reason::OptionMagic);
        };
        self.options += 1;
        if self.options > MAX_OPTIONS {
            return close(Reason::TooManyOptions);
        }
        if option.kind == opt::ABORT {
            return self.abort(option);
        }
        if self.tls_mode == TlsMode::Required && !self.encrypted && option.kind != opt::STARTTLS {
            if option.kind == opt::EXPORT_NAME {
                return close(Reason::ExportName("TLS is required"));
            }
            return self.refuse(option, rep::ERR_TLS_REQD, "start TLS first");
        }
        match option.kind {
            opt::EXPORT_NAME => self.export_name(option),
            opt::INFO | opt::GO | opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => {
                self.option_with_name(option)
            }
            opt::LIST | opt::STARTTLS | opt::STRUCTURED_REPLY | opt::EXTENDED_HEADERS => {
                if option.len != 0 {
                    return self.refuse(option, rep::ERR_INVALID, "this option has no data");
                }
                self.option_without_data(option)
            }
            _ => self.refuse(option, rep::ERR_UNSUP, "unknown option"),
        }
    }

    /// The answer first, then the data it announced is skipped, or not waited for at all.
    fn refuse(&mut self, option: option::Header, kind: u32, message: &str) -> Step {
        self.refuse_rest(option, option.len, kind, message)
    }

    fn refuse_rest(
        &mut self,
        option: option::Header,
        unread: u32,
        kind: u32,
        message: &str,
    ) -> Step {
        let mut send = Vec::new();
        if option.len > MAX_OPTION_BYTES {
            option::reply(&mut send, option.kind, kind, &[message.as_bytes()]);
            let reason = Reason::OptionTooLong(option.kind, option.len);
            return Step { send, next: Next::Close(reason) };
        }
        option::reply(&mut send, option.kind, kind, &[message.as_bytes()]);
        if unread == 0 {
            return self.next_option(send);
        }
        self.state = State::Skipping;
        Step { send, next: Next::Skip(unread) }
    }

    fn abort(&mut self, option: option::Header) -> Step {
        // Data with it is to be ignored. It is read so that closing with it unread doesn't
        // take the acknowledgement with it.
        if option.len == 0 || option.len > MAX_OPTION_BYTES {
            return acknowledge_abort();
        }
        self.state = State::Abort;
        Step { send: Vec::new(), next: Next::Skip(option.len) }
    }

    fn export_name(&mut self, option: option::Header) -> Step {
        if self.agreed.extended {
            return close(Reason::ExportName("extended headers were negotiated"));
        }
        if option.len > MAX_STRING_BYTES {
            return close(Reason::OptionTooLong(option.kind, option.len));
        }
        if option.len == 0 {
            return self.open(String::new(), Asking::ExportName);
        }
        self.state = State::ExportName;
        Step { send: Vec::new(), next: Next::Read(as_usize(option.len)) }
    }

    fn option_without_data(&mut self, option: option::Header) -> Step {
        match option.kind {
            opt::LIST => {
                self.state = State::Listing;
                Step { send: Vec::new(), next: Next::List }
            }
            opt::STARTTLS => self.start_tls(option),
            opt::STRUCTURED_REPLY if self.agreed.extended => {
                let message = "extended headers were negotiated";
                self.refuse(option, rep::ERR_EXT_HEADER_REQD, message)
            }
            opt::STRUCTURED_REPLY => {
                self.agreed.structured = true;
                self.acknowledge(option.kind)
            }
            _ => {
                self.agreed.structured = true;
                self.agreed.extended = true;
                self.acknowledge(option.kind)
            }
        }
    }

    fn start_tls(&mut self, option: option::Header) -> Step {
        if self.encrypted {
            return self.refuse(option, rep::ERR_INVALID, "TLS is in use");
        }
        if self.tls_mode == TlsMode::Off || !self.fixed {
            return self.refuse(option, rep::ERR_POLICY, "there is no TLS here");
        }
        self.state = State::Encrypting;
        let mut send = Vec::new();
        option::reply(&mut send, option.kind, rep::ACK, &[]);
        Step { send, next: Next::StartTls }
    }

    fn acknowledge(&mut self, kind: u32) -> Step {
        let mut send = Vec::new();
        option::reply(&mut send, kind, rep::ACK, &[]);
        self.next_option(send)
    }

    fn negotiated(&self, export: &ExportInfo) -> Negotiated {
        Negotiated {
            structured: self.agreed.structured,
            extended: self.agreed.extended,
            contexts: match &self.agreed.contexts {
                Some((name, contexts)) if *name == export.name => contexts.clone(),
                _ => Vec::new(),
            },
            tls: self.encrypted,
            ..Negotiated::plain(export)
        }
    }
}

fn acknowledge_abort() -> Step {
    let mut send = Vec::new();
    option::reply(&mut send, opt::ABORT, rep::ACK, &[]);
    Step { send, next: Next::Close(Reason::Aborted) }
}

fn close(reason: Reason) -> Step {
    Step { send: Vec::new(), next: Next::Close(reason) }
}

fn as_usize(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
