//! The pictures in `docs/screens`: the output of verbs for an example, as SVG. They are made from
//! fixed data, so that they show the program as it is, and a test holds them to that.

mod svg;

use std::path::Path;

use blockd_api::v1;
use clap::Parser;

use super::Context;
use super::args::Arguments;
use super::output::Output;
use super::output::terminal::Terminal;
use super::program::testing::Absent;
use super::{columns, map, space, top, volumes};
use svg::Screen;

/// Characters in a line of tables.
const WIDTH: usize = 116;
/// Characters and lines of `top`.
const TOP_SIZE: (u16, u16) = (116, 24);

const GIB: i64 = 1 << 30;

fn context() -> Context {
    let terminal = Terminal { interactive: true, width: Some(WIDTH), colour: true };
    let arguments = Arguments::try_parse_from(["blockd", "list"]).unwrap();
    let output = Output::with(false, false, terminal);
    Context { global: arguments.global, output, program: &Absent }
}

fn show(context: &Context) -> String {
    let volume = top::example::volumes().into_iter().find(|volume| volume.name == "web").unwrap();
    let connections = top::example::connections(top::example::SECONDS);
    let connections = connections.into_iter().filter(|one| one.volume == "web").collect();
    let (snapshots, clones) = (Vec::new(), Vec::new());
    volumes::details(&volumes::Shown { volume, connections, snapshots, clones }, context)
}

/// Two snapshots that share what deleting one of them does not free.
fn space(context: &Context) -> String {
    let counted = |mapped: i64, exclusive: i64| v1::Space {
        mapped_bytes: mapped * GIB,
        valid_bytes: mapped * GIB - mapped * GIB / 16,
        exclusive_bytes: exclusive * GIB,
        shared_bytes: (mapped - exclusive) * GIB,
        gives_back_bytes: exclusive * GIB,
        exact: true,
        ..Default::default()
    };
    let volume = |name: &str, space| v1::VolumeSpace {
        name: name.to_owned(),
        kind: v1::VolumeKind::Snapshot.into(),
        origin: "db-data".to_owned(),
        space: Some(space),
    };
    let answer = v1::SpaceResponse {
        volumes: vec![
            volume("db-data@monday", counted(900, 12)),
            volume("db-data@tuesday", counted(940, 31)),
        ],
        together: Some(counted(960, 120)),
    };
    space::table(&space::Counted::of(answer, None), context)
}

fn page(page: top::Page) -> Screen {
    let view = top::View { page, sort: top::Sort::Operations, colour: true, ..Default::default() };
    Screen::of_buffer("blockd top", &top::example_buffer(&view, TOP_SIZE))
}

/// Every picture of this package, by the name of its file.
fn screens() -> Vec<(&'static str, Screen)> {
    let context = context();
    let usual = columns::Column::listed("columns", None).unwrap();
    let listed = columns::table(&top::example::volumes(), &usual, &context);
    let picture = map::text::draw(&map::tests::picture(), Some(64), &context.output);
    vec![
        ("top-volumes", page(top::Page::Volumes)),
        ("top-stages", page(top::Page::Stages)),
        ("top-pools", page(top::Page::Pools)),
        ("top-devices", page(top::Page::Devices)),
        ("top-clients", page(top::Page::Clients)),
        ("list", Screen::of_text("blockd list", &listed)),
        ("show", Screen::of_text("blockd show web", &show(&context))),
        ("pool-map", Screen::of_text("blockd pool map", &picture)),
        ("space", Screen::of_text("blockd space db-data@monday db-data@tuesday", &space(&context))),
    ]
}

/// `cargo ci screens --write` sets `BLOCKD_WRITE_SCREENS`, and the files are written.
#[test]
fn the_pictures_of_the_documents_are_up_to_date() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/screens");
    let writes = std::env::var_os("BLOCKD_WRITE_SCREENS").is_some();
    for (name, screen) in screens() {
        let path = folder.join(format!("{name}.svg"));
        if writes {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, screen.svg()).unwrap();
        }
        let present = std::fs::read_to_string(&path).unwrap_or_default();
        let path = path.display();
        assert!(present == screen.svg(), "{path} is out of date: cargo ci screens --write");
    }
}
