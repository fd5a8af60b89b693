//! Negotiation, from the client's side.

use std::io::{Read, Write};

use super::{ClientError, ConnectOptions};
use crate::BASE_ALLOCATION;
use crate::codec::{
    INIT_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, greeting, info, opt, rep, u16_at, u32_at, u64_at,
};

/// The longest reply to an option that is read: two strings of the longest length, and numbers.
const MAX_REPLY_BYTES: u32 = 2 * 4096 + 64;

/// The most exports of a list that are remembered.
const MAX_EXPORTS: usize = 1 << 16;

/// An export as a list has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedExport {
    pub name: String,
    /// For people; may be empty.
    pub description: String,
}

/// The facts and grants that the server sent for the export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportFacts {
    /// Bytes.
    pub size: u64,
    /// `codec::transmission`.
    pub flags: u16,
    pub block_min: u32,
    pub block_preferred: u32,
    pub block_max: u32,
    pub structured: bool,
    pub extended: bool,
    /// The id of `base:allocation`, if it was granted.
    pub base_allocation: Option<u32>,
    /// The further contexts that were asked for, with the id of each that was granted.
    pub contexts: Vec<(String, Option<u32>)>,
}

impl ExportFacts {
    /// Whether a metadata context was granted, which a block status needs.
    pub(super) fn has_context(&self) -> bool {
        self.base_allocation.is_some() || self.contexts.iter().any(|(_, id)| id.is_some())
    }
}

struct Reply {
    kind: u32,
    data: Vec<u8>,
}

impl Reply {
    fn refused(&self, what: &'static str) -> ClientError {
        let message = String::from_utf8_lossy(&self.data).into_owned();
        ClientError::Refused { what, reply: self.kind, message }
    }
}

pub(super) struct Negotiation<'a, S> {
    pub(super) stream: &'a mut S,
}

impl<S: Read + Write> Negotiation<'_, S> {
    /// Magic and flags.
    pub(super) fn greet(&mut self) -> Result<(), ClientError> {
        let mut hello = [0; 18];
        self.stream.read_exact(&mut hello)?;
        if u64_at(&hello, 0) != Some(INIT_MAGIC) {
            return Err(ClientError::Protocol("it is not an NBD server"));
        }
        let flags = u16_at(&hello, 16).unwrap_or(0);
        let newstyle = u64_at(&hello, 8) == Some(OPTION_MAGIC);
        if !newstyle || flags & greeting::FIXED_NEWSTYLE == 0 {
            return Err(ClientError::Protocol("it does not speak fixed newstyle"));
        }
        let flags = u32::from(flags & (greeting::FIXED_NEWSTYLE | greeting::NO_ZEROES));
        self.stream.write_all(&flags.to_be_bytes())?;
        Ok(())
    }

    /// Makes the server begin TLS, as the next of its stream.
    pub(super) fn start_tls(&mut self) -> Result<(), ClientError> {
        self.send(opt::STARTTLS, &[])?;
        let reply = self.reply(opt::STARTTLS)?;
        if reply.kind == rep::ACK { Ok(()) } else { Err(reply.refused("TLS")) }
    }

    /// Enters the transmission phase.
    pub(super) fn go(
        &mut self,
        export: &str,
        options: &ConnectOptions,
    ) -> Result<ExportFacts, ClientError> {
        let mut facts = ExportFacts {
            block_min: 1,
            block_preferred: 4096,
            block_max: crate::MAX_PAYLOAD_BYTES,
            ..ExportFacts::default()
        };
        if options.extended && self.simple_option(opt::EXTENDED_HEADERS)? {
            (facts.extended, facts.structured) = (true, true);
        }
        if options.structured && !facts.structured {
            facts.structured = self.simple_option(opt::STRUCTURED_REPLY)?;
        }
        if facts.structured {
            self.contexts(export, options, &mut facts)?;
        }
        let mut data = length(export).to_be_bytes().to_vec();
        data.extend_from_slice(export.as_bytes());
        data.extend_from_slice(&1_u16.to_be_bytes());
        data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
        self.send(opt::GO, &data)?;
        loop {
            let reply = self.reply(opt::GO)?;
            match reply.kind {
                rep::INFO => read_info(&reply.data, &mut facts)?,
                rep::ACK => return Ok(facts),
                _ => return Err(reply.refused("the export")),
            }
        }
    }

    /// All exports, then goodbye.
    pub(super) fn list(&mut self) -> Result<Vec<ListedExport>, ClientError> {
        self.send(opt::LIST, &[])?;
        let mut exports = Vec::new();
        loop {
            let reply = self.reply(opt::LIST)?;
            match reply.kind {
                rep::SERVER if exports.len() < MAX_EXPORTS => exports.push(listed(&reply.data)?),
                rep::SERVER => return Err(ClientError::Protocol("it lists too many exports")),
                rep::ACK => break,
                _ => return Err(reply.refused("the list of exports")),
            }
        }
        self.send(opt::ABORT, &[])?;
        Ok(exports)
    }

    /// An option that is granted or not.
    fn simple_option(&mut self, option: u32) -> Result<bool, ClientError> {
        self.send(option, &[])?;
        let reply = self.reply(option)?;
        match reply.kind {
            rep::ACK => Ok(true),
            rep::ERR_TLS_REQD => Err(reply.refused("a connection without TLS")),
            kind if kind & rep::ERROR != 0 => Ok(false),
            _ => Err(ClientError::Protocol("an option has a reply that it can't have")),
        }
    }

    fn contexts(
        &mut self,
        export: &str,
        options: &ConnectOptions,
        facts: &mut ExportFacts,
    ) -> Result<(), ClientError> {
        facts.contexts = options.contexts.iter().map(|name| (name.clone(), None)).collect();
        let base = options.base_allocation.then_some(BASE_ALLOCATION);
        let queries: Vec<&str> =
            base.into_iter().chain(options.contexts.iter().map(String::as_str)).collect();
        if queries.is_empty() {
            return Ok(());
        }
        let mut data = length(export).to_be_bytes().to_vec();
        data.extend_from_slice(export.as_bytes());
        data.extend_from_slice(&u32::try_from(queries.len()).unwrap_or(0).to_be_bytes());
        for query in queries {
            data.extend_from_slice(&length(query).to_be_bytes());
            data.extend_from_slice(query.as_bytes());
        }
        self.send(opt::SET_META_CONTEXT, &data)?;
        loop {
            let reply = self.reply(opt::SET_META_CONTEXT)?;
            match reply.kind {
                rep::META_CONTEXT => {
                    let (id, name) = (u32_at(&reply.data, 0), reply.data.get(4..));
                    if base.is_some() && name == Some(BASE_ALLOCATION.as_bytes()) {
                        facts.base_allocation = id;
                    }
                    let is_it = |known: &&mut (String, _)| name == Some(known.0.as_bytes());
                    if let Some(known) = facts.contexts.iter_mut().find(is_it) {
                        known.1 = id;
                    }
                }
                rep::ACK => return Ok(()),
                kind if kind & rep::ERROR != 0 => return Ok(()),
                _ => return Err(ClientError::Protocol("an option has a reply it can't have")),
            }
        }
    }

    fn send(&mut self, option: u32, data: &[u8]) -> Result<(), ClientError> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend_from_slice(&option.to_be_bytes());
        let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
        bytes.extend_from_slice(&len.to_be_bytes());
        bytes.extend_from_slice(data);
        self.stream.write_all(&bytes)?;
        // A stream with TLS may keep bytes back.
        self.stream.flush()?;
        Ok(())
    }

    fn reply(&mut self, option: u32) -> Result<Reply, ClientError> {
        let mut header = [0; 20];
        self.stream.read_exact(&mut header)?;
        if u64_at(&header, 0) != Some(OPTION_REPLY_MAGIC) || u32_at(&header, 8) != Some(option) {
            return Err(ClientError::Protocol("a reply to an option is not one"));
        }
        let kind = u32_at(&header, 12).unwrap_or(0);
        let len = u32_at(&header, 16).unwrap_or(0);
        if len > MAX_REPLY_BYTES {
            return Err(ClientError::Protocol("a reply to an option is too long"));
        }
        let mut data = vec![0; usize::try_from(len).unwrap_or(0)];
        self.stream.read_exact(&mut data)?;
        Ok(Reply { kind, data })
    }
}

fn length(text: &str) -> u32 {
    u32::try_from(text.len()).unwrap_or(u32::MAX)
}

fn listed(data: &[u8]) -> Result<ListedExport, ClientError> {
    let wrong = ClientError::Protocol("an export of the list is not one");
    let len = u32_at(data, 0).and_then(|len| usize::try_from(len).ok());
    let Some(len) = len.filter(|len| *len <= data.len() - 4) else { return Err(wrong) };
    let (name, description) = data[4..].split_at(len);
    Ok(ListedExport {
        name: String::from_utf8_lossy(name).into_owned(),
        description: String::from_utf8_lossy(description).into_owned(),
    })
}

fn read_info(data: &[u8], facts: &mut ExportFacts) -> Result<(), ClientError> {
    let wrong = || ClientError::Protocol("what it says of the export is cut short");
    match u16_at(data, 0).ok_or_else(wrong)? {
        info::EXPORT => {
            facts.size = u64_at(data, 2).ok_or_else(wrong)?;
            facts.flags = u16_at(data, 10).ok_or_else(wrong)?;
        }
        info::BLOCK_SIZE => {
            facts.block_min = u32_at(data, 2).ok_or_else(wrong)?;
            facts.block_preferred = u32_at(data, 6).ok_or_else(wrong)?;
            let longest = u32_at(data, 10).ok_or_else(wrong)?;
            facts.block_max = longest.min(crate::MAX_PAYLOAD_BYTES);
        }
        _ => {}
    }
    Ok(())
}
