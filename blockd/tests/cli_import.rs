//! Import of images that other programs made, and of images made to read what they should not.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::fs::File;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use blockd_media::clock::Clock;
use cli_support::{Daemon, LIMIT, pattern};

const MIB: u64 = 1 << 20;

fn qemu_img(daemon: &Daemon, arguments: &[&str]) {
    let output = Command::new("qemu-img").args(arguments).current_dir(&daemon.dir).output();
    let output = output.expect("qemu-img is installed by `cargo ci setup`");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {complaint}");
}

/// A raw image with data here and there, as a file and as its bytes.
fn raw(daemon: &Daemon, name: &str, seed: u64) -> Vec<u8> {
    let file = File::create(daemon.dir.join(name)).unwrap();
    file.set_len(16 * MIB).unwrap();
    for offset in [0, 5 * MIB + 512, 15 * MIB] {
        file.write_all_at(&pattern(300_000, seed + offset), offset).unwrap();
    }
    std::fs::read(daemon.dir.join(name)).unwrap()
}

/// Asserts the content of a volume; some formats round its size up, with zeroes.
fn holds(daemon: &Daemon, volume: &str, expected: &[u8]) {
    daemon.ok(&["export", volume, "out.img", "--force"]);
    let found = std::fs::read(daemon.dir.join("out.img")).unwrap();
    assert!(found.len() >= expected.len(), "{volume} is too small");
    assert!(found[..expected.len()] == *expected, "{volume} holds other bytes");
    assert!(found[expected.len()..].iter().all(|byte| *byte == 0), "{volume} has more");
}

/// Imports an image that has to be refused, with what the error has to say.
fn refused(daemon: &Daemon, image: &str, more: &[&str], expected: &[&str]) {
    let (code, error) = daemon.failure(&[&["import", image, "victim"], more].concat());
    assert_eq!(code, 3, "{image}: {error}");
    for text in expected {
        assert!(error.contains(text), "{image}: {text:?} is not in: {error}");
    }
    assert_eq!(daemon.failure(&["show", "victim"]).0, 4, "{image}: a volume was made");
}

#[test]
fn images_of_all_formats_are_imported_with_their_bytes_and_their_format_is_printed() {
    let daemon = Daemon::start("1G");
    let bytes = raw(&daemon, "in.img", 1);
    let kinds = [
        ("qcow2", "qcow2", "compat=1.1"),
        ("qcow2", "qcow2", "compat=0.10"),
        ("vhd", "vpc", "subformat=dynamic"),
        ("vhd", "vpc", "subformat=fixed"),
        ("vhdx", "vhdx", "subformat=dynamic"),
        ("vmdk", "vmdk", "subformat=monolithicSparse"),
        ("vmdk", "vmdk", "subformat=streamOptimized"),
    ];
    for (index, (format, driver, options)) in kinds.into_iter().enumerate() {
        let (image, found, given) =
            (format!("{index}.x"), format!("a{index}"), format!("b{index}"));
        qemu_img(&daemon, &["convert", "-f", "raw", "-O", driver, "-o", options, "in.img", &image]);
        let done = daemon.json(&["import", &image, &found]);
        assert_eq!((&done["format"], &done["format_detected"]), (&format.into(), &true.into()));
        holds(&daemon, &found, &bytes);
        let done = daemon.json(&["import", &image, &given, "--format", format]);
        assert_eq!((&done["format"], &done["format_detected"]), (&format.into(), &false.into()));
        holds(&daemon, &given, &bytes);
    }
    let said = daemon.ok(&["import", "0.x", "said"]);
    assert!(said.contains("(format qcow2, detected)"), "{said}");
    let said = daemon.ok(&["import", "in.img", "raw"]);
    assert!(said.contains("(format raw, detected)"), "{said}");
    // Raw is raw where it is given, whatever the bytes look like.
    let said = daemon.ok(&["import", "0.x", "as-it-is", "--format", "raw"]);
    assert!(said.contains("(format raw),"), "{said}");
    holds(&daemon, "as-it-is", &std::fs::read(daemon.dir.join("0.x")).unwrap());
    // A colon is a part of a file's name, and no protocol.
    std::fs::copy(daemon.dir.join("0.x"), daemon.dir.join("nbd:fat:x,y")).unwrap();
    daemon.ok(&["import", "nbd:fat:x,y", "odd-name"]);
    holds(&daemon, "odd-name", &bytes);
}

/// The image ends within the volume, and within a block of it.
#[test]
fn the_former_content_behind_the_end_of_an_image_is_overwritten() {
    let daemon = Daemon::start("1G");
    let mut bytes = raw(&daemon, "in.img", 1);
    let end = 16 * MIB + 512;
    bytes.extend(pattern(512, 2));
    std::fs::write(daemon.dir.join("in.img"), &bytes).unwrap();
    let former = File::create(daemon.dir.join("former.img")).unwrap();
    former.set_len(32 * MIB).unwrap();
    for offset in [8 * MIB, end - 100_000, 25 * MIB, 32 * MIB - 300_000] {
        former.write_all_at(&pattern(300_000, 3), offset).unwrap();
    }
    daemon.ok(&["add", "--nbd", "--size", "32M", "--block-size", "4096", "data"]);
    for (driver, options) in [("qcow2", "compat=1.1"), ("vpc", "force_size=on")] {
        daemon.ok(&["import", "former.img", "data", "--overwrite"]);
        let image = format!("image.{driver}");
        qemu_img(&daemon, &["convert", "-f", "raw", "-O", driver, "-o", options, "in.img", &image]);
        daemon.ok(&["import", &image, "data", "--overwrite"]);
        holds(&daemon, "data", &bytes);
    }
}

#[test]
fn a_qcow2_image_that_names_another_file_is_refused_by_that_name() {
    let daemon = Daemon::start("1G");
    let secret = daemon.dir.join("secret");
    std::fs::write(&secret, pattern(1 << 20, 9)).unwrap();
    let secret = secret.to_str().unwrap();
    let create = |arguments: &[&str]| {
        qemu_img(&daemon, &[&["create", "-q", "-u", "-f", "qcow2"], arguments].concat());
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = format!("nbd://127.0.0.1:{}/x", listener.local_addr().unwrap().port());
    let json = format!("json:{{\"driver\":\"raw\",\"file.filename\":\"{secret}\"}}");
    let backings = [secret, "/etc/shadow", "../../secret", &address, &json, "fat:/etc"];
    for backing in backings {
        for format in ["raw", "qcow2"] {
            create(&["-b", backing, "-F", format, "evil", "1M"]);
            let start = backing.split('{').next().unwrap();
            refused(&daemon, "evil", &[], &["backing file", start, "--follow-backing"]);
            refused(&daemon, "evil", &["--format", "qcow2"], &["backing file", start]);
        }
    }
    // Without a format, which qemu would guess.
    create(&["-b", secret, "-F", "raw", "-o", "compat=0.10", "evil", "1M"]);
    refused(&daemon, "evil", &[], &["backing file", secret]);
    create(&["-o", "data_file=outside,data_file_raw=on", "evil", "1M"]);
    qemu_img(&daemon, &["amend", "-f", "qcow2", "-o", &format!("data_file={secret}"), "evil"]);
    refused(&daemon, "evil", &[], &["external data file", secret, "--follow-backing"]);
    // Addresses are not followed, whatever is asked for.
    for backing in [&address, &json, "fat:/etc"] {
        create(&["-b", backing, "-F", "raw", "evil", "1M"]);
        refused(&daemon, "evil", &["--follow-backing"], &["only files of this host"]);
    }
    assert!(listener.accept().is_err(), "an import connected to an address that an image names");
    // The method of encryption in the header. qemu-img makes such images only on an idle machine.
    create(&["evil", "1M"]);
    for (method, name) in [(2, "is encrypted (LUKS)"), (1, "is encrypted (AES)")] {
        let file = File::options().write(true).open(daemon.dir.join("evil")).unwrap();
        file.write_all_at(&[method], 35).unwrap();
        refused(&daemon, "evil", &["--follow-backing"], &[name]);
    }
}

#[test]
fn a_vmdk_vhd_or_vhdx_that_names_another_file_is_refused_by_that_name() {
    let daemon = Daemon::start("1G");
    let patch = |name: &str, offset: u64, bytes: &[u8]| {
        let file = File::options().write(true).open(daemon.dir.join(name)).unwrap();
        file.write_all_at(bytes, offset).unwrap();
    };
    let create = |format: &str, more: &[&str]| {
        let _ = std::fs::remove_file(daemon.dir.join("evil"));
        qemu_img(&daemon, &[&["create", "-q", "-f", format, "evil", "16M"], more].concat());
    };
    let flat = "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\n\
                createType=\"monolithicFlat\"\nRW\t2 FLAT \"/etc/passwd\" 0\n";
    std::fs::write(daemon.dir.join("evil"), flat).unwrap();
    refused(&daemon, "evil", &[], &["extent file /etc/passwd", "--follow-backing"]);
    // A sparse file without a capacity of its own is read by its descriptor, too.
    create("vmdk", &[]);
    patch("evil", 12, &[0; 8]);
    patch("evil", 512, &[flat.as_bytes(), &[0; 200]].concat());
    refused(&daemon, "evil", &[], &["extent file /etc/passwd"]);
    create("vmdk", &["-o", "compat6=off"]);
    let parent = flat.replace("ffffffff", "00000001").replace("/etc/passwd", "evil");
    let parent = format!("{parent}parentFileNameHint=\"/etc/shadow\"\n\0");
    patch("evil", 512, parent.as_bytes());
    refused(&daemon, "evil", &[], &["backing file /etc/shadow", "--follow-backing"]);

    create("vpc", &[]);
    let bytes = std::fs::read(daemon.dir.join("evil")).unwrap();
    let header = u64::from_be_bytes(*bytes[16..].first_chunk().unwrap());
    let name: Vec<u8> = "/etc/shadow".encode_utf16().flat_map(u16::to_be_bytes).collect();
    patch("evil", 60, &4_u32.to_be_bytes());
    patch("evil", header + 64, &name);
    for more in [&[][..], &["--format", "vhd"], &["--follow-backing"]] {
        refused(&daemon, "evil", more, &["differencing image", "/etc/shadow"]);
    }

    create("vhdx", &[]);
    let bytes = std::fs::read(daemon.dir.join("evil")).unwrap();
    let parameters = 0xcaa1_6737_u32.to_le_bytes();
    let entry = bytes.windows(4).position(|bytes| bytes == parameters).unwrap();
    let table = bytes[..entry].windows(8).rposition(|bytes| bytes == b"metadata").unwrap();
    let offset = u32::from_le_bytes(*bytes[entry + 16..].first_chunk().unwrap());
    patch("evil", table as u64 + u64::from(offset) + 4, &2_u32.to_le_bytes());
    for more in [&[][..], &["--format", "vhdx"], &["--follow-backing"]] {
        refused(&daemon, "evil", more, &["differencing image"]);
    }
}

#[test]
fn follow_backing_reads_the_local_files_that_an_image_names_and_lists_them() {
    let daemon = Daemon::start("1G");
    let bytes = raw(&daemon, "base.img", 3);
    let create = |arguments: &[&str]| qemu_img(&daemon, &[&["create", "-q"], arguments].concat());
    create(&["-f", "qcow2", "-b", "base.img", "-F", "raw", "middle"]);
    create(&["-f", "qcow2", "-b", "middle", "-F", "qcow2", "top"]);
    refused(&daemon, "top", &[], &["backing file middle"]);
    let done = daemon.json(&["import", "top", "data", "--follow-backing"]);
    let others: Vec<_> = done["other_files"].as_array().unwrap().iter().collect();
    let named = |name: &str| serde_json::Value::from(daemon.dir.join(name).to_str().unwrap());
    assert_eq!(others, [&named("middle"), &named("base.img")], "{done}");
    holds(&daemon, "data", &bytes);
    qemu_img(&daemon, &["convert", "-O", "qcow2", "-o", "data_file=bytes", "base.img", "outer"]);
    daemon.ok(&["import", "outer", "outer", "--follow-backing"]);
    holds(&daemon, "outer", &bytes);
    let flat =
        ["convert", "-O", "vmdk", "-o", "subformat=twoGbMaxExtentFlat", "base.img", "f.vmdk"];
    qemu_img(&daemon, &flat);
    refused(&daemon, "f.vmdk", &[], &["extent file f-f001.vmdk"]);
    daemon.ok(&["import", "f.vmdk", "flat", "--follow-backing"]);
    holds(&daemon, "flat", &bytes);
    // A chain that leads to itself ends.
    create(&["-u", "-f", "qcow2", "-b", "./loop", "-F", "qcow2", "loop", "1M"]);
    refused(&daemon, "loop", &["--follow-backing"], &["at most 16 layers"]);
}

/// A program of that name in the daemon's folder, and the search path with it.
fn instead_of_qemu_img(daemon: &Daemon, script: &str) -> String {
    let folder = daemon.dir.join("bin");
    std::fs::create_dir_all(&folder).unwrap();
    let program = folder.join("qemu-img");
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    format!("{}:{}", folder.display(), std::env::var("PATH").unwrap())
}

/// The confinement of qemu-img does not depend on the check of an image's header alone.
#[test]
fn qemu_img_reaches_no_other_file_and_no_network_during_an_import() {
    let daemon = Daemon::start("1G");
    qemu_img(&daemon, &["create", "-q", "-f", "qcow2", "image", "1M"]);
    std::fs::write(daemon.dir.join("secret"), "x").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let script = format!(
        "#!/bin/bash\n\
         head -c 4 /proc/self/fd/0 | grep -q QFI && said=image\n\
         cat {} 2>/dev/null && said=\"$said secret\"\n\
         (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && said=\"$said network\"\n\
         (echo x > {}/made) 2>/dev/null && said=\"$said writing\"\n\
         (ulimit -Hc 0; ulimit -Hc 1) 2>/dev/null && said=\"$said limits\"\n\
         echo \"reached: $said.\" >&2; exit 1\n",
        daemon.dir.join("secret").display(),
        daemon.dir.display(),
    );
    let path = instead_of_qemu_img(&daemon, &script);
    let output = daemon.command(&["import", "image", "data"]).env("PATH", path).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    // Only root can take the network away.
    let is_root = nix::unistd::geteuid().is_root();
    let expected = if is_root { "reached: image." } else { "reached: image network." };
    assert!(error.contains(expected), "{error}");
}

#[test]
fn an_image_that_changes_while_it_is_imported_leaves_no_volume() {
    let daemon = Daemon::start("1G");
    qemu_img(&daemon, &["create", "-q", "-f", "qcow2", "image", "1M"]);
    let image = daemon.dir.join("image");
    let size = std::fs::metadata(&image).unwrap().len();
    // A conversion that lasts until the file has grown.
    let script = format!(
        "#!/bin/bash\nif [ $1 = info ]; then echo '{{\"virtual-size\": 1048576}}'; exit; fi\n\
         while [ $(stat -L -c %s /proc/self/fd/0) = {size} ]; do sleep 0.05; done\n"
    );
    let path = instead_of_qemu_img(&daemon, &script);
    let mut import = daemon.command(&["import", "image", "data"]);
    let import = import.env("PATH", path).stdout(Stdio::null()).stderr(Stdio::piped());
    let import = import.spawn().unwrap();
    let clock = Clock::start();
    while !daemon.run(&["show", "data"]).status.success() {
        assert!(clock.elapsed() < LIMIT, "no volume is made");
        std::thread::sleep(Duration::from_millis(20));
    }
    append(&image);
    let output = import.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && error.contains("was changed while it was imported"),
        "{error}"
    );
    assert_eq!(daemon.failure(&["show", "data"]).0, 4, "the volume is still there");
}

/// Descriptors that qemu reads otherwise than line by line.
#[test]
fn a_vmdk_descriptor_that_hides_a_name_is_refused() {
    let daemon = Daemon::start("1G");
    let whole = "RW 2048 FLAT \"part\" 0\n";
    let cases = [
        ("\x0bRW 2048 FLAT \"/etc/shadow\" 0\n", "extent file"),
        ("RW\n2048 FLAT \"/etc/shadow\" 0\n", "incomplete"),
        ("RW 2048 FLAT\n\"/etc/shadow\" 0\n", "incomplete"),
        ("RW 2048 ZERO\n\"/etc/shadow\" 0\n", "begins with a name"),
        ("# parentFileNameHint=\"/etc/shadow\"\n", "backing file /etc/shadow"),
    ];
    std::fs::write(daemon.dir.join("part"), [1; 1 << 20]).unwrap();
    for (line, expected) in cases {
        let text = format!(
            "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\n\
             createType=\"monolithicFlat\"\n{line}{whole}"
        );
        std::fs::write(daemon.dir.join("hides.vmdk"), text).unwrap();
        refused(&daemon, "hides.vmdk", &[], &[expected]);
    }
}

/// qemu takes the parent from byte 512, wherever the header puts the descriptor.
#[test]
fn a_vmdk_parent_is_found_where_the_header_names_no_descriptor() {
    let daemon = Daemon::start("1G");
    raw(&daemon, "in.img", 3);
    let sparse = ["convert", "-f", "raw", "-O", "vmdk", "in.img", "delta.vmdk"];
    qemu_img(&daemon, &sparse);
    let file = File::options().read(true).write(true).open(daemon.dir.join("delta.vmdk")).unwrap();
    file.write_all_at(&[0; 8], 28).unwrap();
    let hint = b"# Disk DescriptorFile\nparentCID=12345678\nparentFileNameHint=\"base.vmdk\"\n\0";
    file.write_all_at(hint, 512).unwrap();
    refused(&daemon, "delta.vmdk", &[], &["backing file base.vmdk"]);
}

#[test]
fn a_backing_file_without_a_format_is_not_followed() {
    let daemon = Daemon::start("1G");
    raw(&daemon, "base.img", 4);
    qemu_img(&daemon, &["create", "-q", "-f", "qcow2", "-b", "base.img", "-F", "raw", "top.qcow2"]);
    // The header extension of the format becomes one that readers skip.
    let path = daemon.dir.join("top.qcow2");
    let mut bytes = std::fs::read(&path).unwrap();
    let mark = [0xe2, 0x79, 0x2a, 0xca];
    let at = bytes.windows(4).position(|place| place == mark).unwrap();
    bytes[at..at + 4].copy_from_slice(&[0x12, 0x34, 0x56, 0x78]);
    std::fs::write(&path, bytes).unwrap();
    refused(&daemon, "top.qcow2", &["--follow-backing"], &["base.img", "does not say in which"]);
}

#[test]
fn an_image_that_is_a_fifo_is_refused_at_once() {
    let daemon = Daemon::start("1G");
    nix::unistd::mkfifo(&daemon.dir.join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut import = daemon.command(&["import", "fifo", "data"]);
    let mut import = import.stderr(Stdio::piped()).spawn().unwrap();
    let clock = Clock::start();
    while import.try_wait().unwrap().is_none() {
        if clock.elapsed() > LIMIT {
            import.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = import.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("a file or a block device"), "{error}");
}

fn append(path: &Path) {
    File::options().append(true).open(path).unwrap().write_all(b"more").unwrap();
}
