//! The NBD codec against bytes written by hand from the protocol's document, and against
//! anything at all.
#![forbid(unsafe_code)]

mod anything;
mod options;
mod replies;
mod requests;
mod talk;

use blockd_nbd::codec::request::Asked;
use blockd_nbd::{Describes, ExportInfo, Negotiated, Selected};

pub(crate) const GIB: u64 = 1 << 30;

pub(crate) fn export() -> ExportInfo {
    ExportInfo {
        name: "default/web".to_owned(),
        description: "1 GiB".to_owned(),
        size: GIB,
        block_size: 512,
        preferred_size: 4096,
        read_only: false,
        multi_conn: true,
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Form {
    Simple,
    Structured,
    Extended,
}

pub(crate) fn agreed(form: Form) -> Negotiated {
    let (structured, extended) = match form {
        Form::Simple => (false, false),
        Form::Structured => (true, false),
        Form::Extended => (true, true),
    };
    let base = structured.then_some(Selected { id: 1, describes: Describes::BaseAllocation });
    let contexts = base.into_iter().collect();
    Negotiated { structured, extended, contexts, ..Negotiated::plain(&export()) }
}

/// Bytes from hexadecimal digits; spaces are for people.
pub(crate) fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(16)).collect();
    digits.chunks(2).map(|pair| u8::try_from(pair[0] * 16 + pair[1]).expect("it fits")).collect()
}

pub(crate) const ASKED: Asked = Asked { cookie: 0x0102_0304_0506_0708, offset: 0x1000 };
