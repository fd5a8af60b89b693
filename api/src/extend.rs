//! The protocol of thin LVHD by which a data path outside of the daemon requests space, as
//! bytes. Nothing here does IO, blocks, or trusts its input.
//!
//! ```text
//! extend:    total u16 | type 0 | name length u8, NUL included | name | NUL
//!            | virtual size u64 | current size u64 | size of metadata u64
//! shutdown:  total u16 | type 1
//! ```
//!
//! All numbers are big-endian, and `total` counts every byte of the message. The type may be the
//! number or its ASCII digit; an extend request is answered by one byte in the same form. There is
//! no negative answer.

/// Bytes before the name: total, type, name length.
const HEAD: usize = 4;
/// Bytes behind the name: three numbers.
const NUMBERS: usize = 24;
/// Bytes of a shutdown request.
pub const SHUTDOWN_BYTES: usize = 3;
/// Bytes that a name can have without its NUL: their count with it is one byte.
pub const MAX_NAME_BYTES: usize = 254;
/// Bytes of the longest message. A message that announces more is rejected.
pub const MAX_MESSAGE_BYTES: usize = HEAD + MAX_NAME_BYTES + 1 + NUMBERS;
/// Bytes of the shortest extend request: a name of one byte.
const MIN_EXTEND_BYTES: usize = HEAD + 2 + NUMBERS;

const EXTEND: u8 = 0;
const SHUTDOWN: u8 = 1;

/// How a message writes its type. The protocol's description has '0' and permits both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// The number, as the fields around it are.
    Binary,
    /// The ASCII digit.
    Ascii,
}

impl Form {
    const fn of(self, number: u8) -> u8 {
        match self {
            Self::Binary => number,
            Self::Ascii => b'0' + number,
        }
    }

    /// The answer to an extend request: look at the size again.
    #[must_use]
    pub const fn answer(self) -> u8 {
        self.of(EXTEND)
    }
}

/// A request for more space.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Extend {
    /// How its type was written.
    pub form: Form,
    /// The volume: 1 to 254 bytes, none of them NUL.
    pub name: Vec<u8>,
    /// Bytes that a client of the volume sees.
    pub virtual_size: u64,
    /// Bytes that the volume has been given so far.
    pub current_size: u64,
    /// Bytes of these that are metadata of the data path.
    pub metadata_size: u64,
}

impl Extend {
    /// Bytes that the volume can still come to need: its data and metadata, less what it has.
    #[must_use]
    pub const fn room(&self) -> u64 {
        self.virtual_size.saturating_add(self.metadata_size).saturating_sub(self.current_size)
    }
}

/// A message from a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// A volume needs more space. Answered by [`Form::answer`] once there is some.
    Extend(Extend),
    /// The daemon is to end. Not answered.
    Shutdown(Form),
}

/// An invalid message. The connection ends: where the next message would begin is not known.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// Less than the shortest message, or more than the longest.
    #[error("total length is {0}: must be from {SHUTDOWN_BYTES} to {MAX_MESSAGE_BYTES}")]
    Total(u16),
    /// Neither extend nor shutdown.
    #[error("type is {0:#04x}: must be 0 or 1, or the ASCII digit of one of them")]
    Type(u8),
    /// A total that doesn't fit its type.
    #[error("total length is {found}: must be {expected} for this message")]
    Length {
        /// The total length in the message.
        found: u16,
        /// The required length; for an extend request, the minimum.
        expected: usize,
    },
    /// No room for a name and its NUL.
    #[error("name length is {0}: must be from 2 to 255, NUL included")]
    NameLength(usize),
    /// The name's last byte.
    #[error("name does not end with NUL")]
    NoNul,
    /// A NUL before the name's last byte.
    #[error("name has a NUL at byte {0}: must have one at its end only")]
    EmbeddedNul(usize),
}

/// The result of parsing the beginning of some bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Parsed {
    /// The beginning of a message: this number of further bytes can be read within it.
    Need(usize),
    /// A message, and how many bytes it took.
    Message(Message, usize),
    /// No message. Said as soon as it can be known.
    Refused(Refusal),
}

/// Reads one message.
#[must_use]
pub fn parse(bytes: &[u8]) -> Parsed {
    match try_parse(bytes) {
        Ok(parsed) => parsed,
        Err(refusal) => Parsed::Refused(refusal),
    }
}

fn try_parse(bytes: &[u8]) -> Result<Parsed, Refusal> {
    let Some(&found) = bytes.first_chunk() else { return Ok(Parsed::Need(2 - bytes.len())) };
    let found = u16::from_be_bytes(found);
    let total = usize::from(found);
    if !(SHUTDOWN_BYTES..=MAX_MESSAGE_BYTES).contains(&total) {
        return Err(Refusal::Total(found));
    }
    let Some(&kind) = bytes.get(2) else { return Ok(Parsed::Need(1)) };
    let (number, form) = match kind {
        EXTEND | SHUTDOWN => (kind, Form::Binary),
        b'0' | b'1' => (kind - b'0', Form::Ascii),
        other => return Err(Refusal::Type(other)),
    };
    if number == SHUTDOWN {
        return match total {
            SHUTDOWN_BYTES => Ok(Parsed::Message(Message::Shutdown(form), total)),
            _ => Err(Refusal::Length { found, expected: SHUTDOWN_BYTES }),
        };
    }
    if total < MIN_EXTEND_BYTES {
        return Err(Refusal::Length { found, expected: MIN_EXTEND_BYTES });
    }
    let Some(&name_length) = bytes.get(3) else { return Ok(Parsed::Need(1)) };
    let name_length = usize::from(name_length);
    if name_length < 2 {
        return Err(Refusal::NameLength(name_length));
    }
    let expected = HEAD + name_length + NUMBERS;
    if total != expected {
        return Err(Refusal::Length { found, expected });
    }
    let Some(message) = bytes.get(..total) else { return Ok(Parsed::Need(total - bytes.len())) };
    let (name, numbers) = message[HEAD..].split_at(name_length);
    let name = match name.split_last() {
        Some((0, name)) => name,
        _ => return Err(Refusal::NoNul),
    };
    if let Some(at) = name.iter().position(|byte| *byte == 0) {
        return Err(Refusal::EmbeddedNul(at));
    }
    let extend = Extend {
        form,
        name: name.to_vec(),
        virtual_size: number_at(numbers, 0),
        current_size: number_at(numbers, 1),
        metadata_size: number_at(numbers, 2),
    };
    Ok(Parsed::Message(Message::Extend(extend), total))
}

/// The number of this index; there are three.
fn number_at(numbers: &[u8], index: usize) -> u64 {
    let bytes = numbers.get(8 * index..).and_then(<[u8]>::first_chunk);
    u64::from_be_bytes(bytes.copied().unwrap_or_default())
}

impl Message {
    /// The message as bytes. Refused when its name can't be said.
    pub fn encode(&self) -> Result<Vec<u8>, Refusal> {
        let extend = match self {
            Self::Shutdown(form) => return Ok(vec![0, 3, form.of(SHUTDOWN)]),
            Self::Extend(extend) => extend,
        };
        let with_nul = extend.name.len() + 1;
        let name_length = match u8::try_from(with_nul) {
            Ok(length) if length >= 2 => length,
            _ => return Err(Refusal::NameLength(with_nul)),
        };
        if let Some(at) = extend.name.iter().position(|byte| *byte == 0) {
            return Err(Refusal::EmbeddedNul(at));
        }
        let total = u16::from(name_length) + 28;
        let mut bytes = total.to_be_bytes().to_vec();
        bytes.extend([extend.form.of(EXTEND), name_length]);
        bytes.extend(&extend.name);
        bytes.push(0);
        for number in [extend.virtual_size, extend.current_size, extend.metadata_size] {
            bytes.extend(number.to_be_bytes());
        }
        Ok(bytes)
    }
}
