//! The server's side of NBD, as much of it as qemu needs: fixed newstyle, `NBD_OPT_GO`, simple
//! replies.

use std::io::{BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use anyhow::{Result, bail, ensure};
use blockd_nbd::codec::cmd::{DISC, FLUSH, READ, TRIM, WRITE, WRITE_ZEROES};
use blockd_nbd::codec::errno::{EINVAL, EIO};
use blockd_nbd::codec::request::{HEADER_BYTES, Header, Parsed, parse};
use blockd_nbd::codec::{
    INIT_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, flag, greeting, info, opt,
    rep, transmission,
};

use super::cache::Cache;
use super::lock;

/// The capabilities of the disk.
const CAN: u16 = transmission::HAS_FLAGS
    | transmission::SEND_FLUSH
    | transmission::SEND_FUA
    | transmission::SEND_TRIM
    | transmission::SEND_WRITE_ZEROES;

/// Limit on a request's length; those of qemu are no longer.
const LONGEST: u64 = 32 << 20;

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

/// A request, and the data of a write.
type Request = (Header, Vec<u8>);

fn serve(mut reader: BufReader<UnixStream>, mut stream: UnixStream, cache: &Mutex<Cache>) {
    let (sender, requests) = channel();
    let receives = std::thread::spawn(move || {
        while let Ok(request) = request(&mut reader) {
            if request.0.kind == DISC || sender.send(request).is_err() {
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
            let mut reply = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
            reply.extend(error.to_be_bytes());
            reply.extend(request.0.cookie.to_be_bytes());
            reply.extend(data);
            stream.write_all(&reply)?;
        }
    }
    Ok(())
}

/// Does a request; an error number and the data of a read.
fn done((header, payload): &Request, cache: &mut Cache) -> (u32, Vec<u8>) {
    if header.kind != FLUSH && !cache.takes(header.offset, header.len) {
        return (EINVAL, Vec::new());
    }
    let zeroes = || vec![0; usize::try_from(header.len).unwrap_or(0)];
    let mut data = Vec::new();
    let result = match header.kind {
        READ => {
            data = zeroes();
            cache.read(header.offset, &mut data)
        }
        FLUSH => cache.flush(),
        WRITE => write(header, payload, cache),
        TRIM | WRITE_ZEROES => write(header, &zeroes(), cache),
        _ => return (EINVAL, Vec::new()),
    };
    if result.is_err() { (EIO, Vec::new()) } else { (0, data) }
}

fn write(header: &Header, data: &[u8], cache: &mut Cache) -> Result<()> {
    if header.flags & flag::FUA == 0 {
        cache.write(header.offset, data)
    } else {
        cache.write_durably(header.offset, data)
    }
}

fn request(reader: &mut impl Read) -> Result<Request> {
    let Parsed::Header(header, _) = parse(&bytes::<HEADER_BYTES>(reader)?, false) else {
        bail!("no request");
    };
    let Header { kind, len, .. } = header;
    ensure!(len <= LONGEST || kind == TRIM || kind == WRITE_ZEROES, "{len} bytes at once");
    let mut data = Vec::new();
    if kind == WRITE {
        data.resize(usize::try_from(len)?, 0);
        reader.read_exact(&mut data)?;
    }
    Ok((header, data))
}

/// Negotiates until the client has chosen the disk.
fn negotiated(mut stream: UnixStream, size: u64) -> Result<(BufReader<UnixStream>, UnixStream)> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut hello = INIT_MAGIC.to_be_bytes().to_vec();
    hello.extend(OPTION_MAGIC.to_be_bytes());
    hello.extend((greeting::FIXED_NEWSTYLE | greeting::NO_ZEROES).to_be_bytes());
    stream.write_all(&hello)?;
    let _: [u8; 4] = bytes(&mut reader)?;
    loop {
        ensure!(u64::from_be_bytes(bytes(&mut reader)?) == OPTION_MAGIC, "no option");
        let option = u32::from_be_bytes(bytes(&mut reader)?);
        let len = u32::from_be_bytes(bytes(&mut reader)?);
        ensure!(u64::from(len) <= LONGEST, "an option of {len} bytes");
        let mut data = vec![0; usize::try_from(len)?];
        reader.read_exact(&mut data)?;
        match option {
            // There is one disk; whatever name is asked for, it is this one.
            opt::GO | opt::INFO => {
                let mut facts = info::EXPORT.to_be_bytes().to_vec();
                facts.extend(size.to_be_bytes());
                facts.extend(CAN.to_be_bytes());
                reply(&mut stream, option, rep::INFO, &facts)?;
                reply(&mut stream, option, rep::ACK, &[])?;
                if option == opt::GO {
                    return Ok((reader, stream));
                }
            }
            opt::ABORT => bail!("the client went away"),
            _ => reply(&mut stream, option, rep::ERR_UNSUP, &[])?,
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
