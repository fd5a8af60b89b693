//! The server's side of NBD, as much of it as qemu needs: fixed newstyle, `NBD_OPT_GO`, simple
//! replies. Written from the protocol's document, independent of the daemon's own code.

use std::io::{BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use anyhow::{Result, bail, ensure};

use super::cache::Cache;
use super::lock;

const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// Fixed newstyle, and no zeroes after the old form of negotiation.
const GREETING: u16 = 3;
/// Flags, flush, FUA, trim, write zeroes: what the disk can do.
const CAN: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6;

const OPTION_ABORT: u32 = 2;
const OPTION_INFO: u32 = 6;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_UNSUPPORTED: u32 = 1 << 31 | 1;
const INFO_EXPORT: u16 = 0;

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;
const FUA: u16 = 1;

const EIO: u32 = 5;
const EINVAL: u32 = 22;

/// Limit on a request's length; those of qemu are no longer.
const LONGEST: u32 = 32 << 20;

/// Serves one client after the other, each on threads of its own.
pub(super) fn listen(
    listener: &UnixListener,
    cache: &Arc<Mutex<Cache>>,
    clients: &Arc<AtomicUsize>,
) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else { return };
        let (cache, clients) = (Arc::clone(cache), Arc::clone(clients));
        clients.fetch_add(1, Ordering::SeqCst);
        let size = lock(&cache).size();
        std::thread::spawn(move || {
            // A client that goes away in the middle is what these tests are about.
            if let Ok((reader, stream)) = negotiated(stream, size) {
                serve(reader, stream, &cache);
            }
            clients.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

#[derive(Debug)]
struct Request {
    flags: u16,
    kind: u16,
    cookie: [u8; 8],
    offset: u64,
    len: u32,
    data: Vec<u8>,
}

fn serve(mut reader: BufReader<UnixStream>, mut stream: UnixStream, cache: &Mutex<Cache>) {
    let (sender, requests) = channel();
    let receives = std::thread::spawn(move || {
        while let Ok(request) = request(&mut reader) {
            if request.kind == DISCONNECT || sender.send(request).is_err() {
                return;
            }
        }
    });
    let _ = answer_all(&requests, &mut stream, cache);
    let _ = stream.shutdown(std::net::Shutdown::Both);
    let _ = receives.join();
}

/// Takes all that has come, and does it in a drawn order.
fn answer_all(
    requests: &Receiver<Request>,
    stream: &mut UnixStream,
    cache: &Mutex<Cache>,
) -> Result<()> {
    while let Ok(first) = requests.recv() {
        let mut together = vec![first];
        together.extend(requests.try_iter());
        while !together.is_empty() {
            let mut cache = lock(cache);
            let next = cache.draw(together.len());
            let request = together.swap_remove(next);
            let (error, data) = done(&request, &mut cache);
            drop(cache);
            let mut reply = REPLY_MAGIC.to_be_bytes().to_vec();
            reply.extend(error.to_be_bytes());
            reply.extend(request.cookie);
            reply.extend(data);
            stream.write_all(&reply)?;
        }
    }
    Ok(())
}

/// Does a request; an error number and the data of a read.
fn done(request: &Request, cache: &mut Cache) -> (u32, Vec<u8>) {
    if request.kind != FLUSH && !cache.takes(request.offset, u64::from(request.len)) {
        return (EINVAL, Vec::new());
    }
    let mut data = Vec::new();
    let result = match request.kind {
        READ => {
            data.resize(usize::try_from(request.len).unwrap_or(0), 0);
            cache.read(request.offset, &mut data)
        }
        FLUSH => cache.flush(),
        WRITE => write(request, &request.data, cache),
        TRIM | WRITE_ZEROES => {
            let zeroes = vec![0; usize::try_from(request.len).unwrap_or(0)];
            write(request, &zeroes, cache)
        }
        _ => return (EINVAL, Vec::new()),
    };
    if result.is_err() { (EIO, Vec::new()) } else { (0, data) }
}

fn write(request: &Request, data: &[u8], cache: &mut Cache) -> Result<()> {
    if request.flags & FUA == 0 {
        cache.write(request.offset, data)
    } else {
        cache.write_durably(request.offset, data)
    }
}

fn request(reader: &mut impl Read) -> Result<Request> {
    ensure!(u32::from_be_bytes(bytes(reader)?) == REQUEST_MAGIC, "no request");
    let flags = u16::from_be_bytes(bytes(reader)?);
    let kind = u16::from_be_bytes(bytes(reader)?);
    let cookie = bytes(reader)?;
    let offset = u64::from_be_bytes(bytes(reader)?);
    let len = u32::from_be_bytes(bytes(reader)?);
    ensure!(len <= LONGEST || kind == TRIM || kind == WRITE_ZEROES, "{len} bytes at once");
    let mut data = Vec::new();
    if kind == WRITE {
        data.resize(usize::try_from(len)?, 0);
        reader.read_exact(&mut data)?;
    }
    Ok(Request { flags, kind, cookie, offset, len, data })
}

/// Negotiates until the client has chosen the disk.
fn negotiated(mut stream: UnixStream, size: u64) -> Result<(BufReader<UnixStream>, UnixStream)> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut greeting = SERVER_MAGIC.to_be_bytes().to_vec();
    greeting.extend(OPTION_MAGIC.to_be_bytes());
    greeting.extend(GREETING.to_be_bytes());
    stream.write_all(&greeting)?;
    let _: [u8; 4] = bytes(&mut reader)?;
    loop {
        ensure!(u64::from_be_bytes(bytes(&mut reader)?) == OPTION_MAGIC, "no option");
        let option = u32::from_be_bytes(bytes(&mut reader)?);
        let len = u32::from_be_bytes(bytes(&mut reader)?);
        ensure!(len <= LONGEST, "an option of {len} bytes");
        let mut data = vec![0; usize::try_from(len)?];
        reader.read_exact(&mut data)?;
        match option {
            // There is one disk; whatever name is asked for, it is this one.
            OPTION_GO | OPTION_INFO => {
                let mut info = INFO_EXPORT.to_be_bytes().to_vec();
                info.extend(size.to_be_bytes());
                info.extend(CAN.to_be_bytes());
                reply(&mut stream, option, REPLY_INFO, &info)?;
                reply(&mut stream, option, REPLY_ACK, &[])?;
                if option == OPTION_GO {
                    return Ok((reader, stream));
                }
            }
            OPTION_ABORT => bail!("the client went away"),
            _ => reply(&mut stream, option, REPLY_UNSUPPORTED, &[])?,
        }
    }
}

fn reply(stream: &mut UnixStream, option: u32, kind: u32, data: &[u8]) -> Result<()> {
    let mut out = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(u32::try_from(data.len())?.to_be_bytes());
    out.extend(data);
    Ok(stream.write_all(&out)?)
}

fn bytes<const N: usize>(reader: &mut impl Read) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    reader.read_exact(&mut bytes)?;
    Ok(bytes)
}
