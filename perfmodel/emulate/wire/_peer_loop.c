/* The message loop of the emulated ranks in C: the same answers as `_operations.py` and `_peer.py` give in Python.

   Python forms groups and accepts connections, and hands each one over as a file descriptor. From then on this loop
   reads gloo's messages, decides what is due when, and writes the answers. It returns to Python when one of Python's
   own descriptors is readable, or when a message does not belong. Only the clock, sockets and epoll of Linux are used.

   A pair's messages are received, granted and sent in order, so that the bitmaps of NeuronaBox (section 2.2) are
   counters here. */

#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Kinds of messages, and of collectives by the first byte of a slot, as in `_gloo_messages.py`. */
enum { DATA = 1, SEND_READY, RECV_READY };
enum { SEND_RECV, GATHER, ALL_GATHER, REDUCE, ALL_REDUCE, SCATTER, BROADCAST, BARRIER, ALL_TO_ALL };
static const char *const KINDS[] = {"send_recv", "gather",    "all_gather", "reduce",    "all_reduce",
                                    "scatter",   "broadcast", "barrier",    "all_to_all"};

#define HEADER_WORDS 6
#define HEADER_BYTES (HEADER_WORDS * 8)
#define BOX_BYTES (1 << 13)
#define SCRAP_BYTES (1 << 22)
#define KEPT_BYTES (1 << 22)
#define AWAITED_BYTES (1 << 16)
#define MOST_AT_ONCE (1 << 22)
#define MOST_PARTS 64
#define MOST_OPERATIONS 64
#define MOST_EVENTS 256
#define NEVER_S INFINITY

typedef struct {
    uint64_t nbytes;
    double announced_s;
} message;

typedef struct {
    message *items;
    int n, room;
} messages;

struct group;
struct operation;

/* A message on its way out: its header, its data, and how much of both has left. */
typedef struct {
    uint64_t header[HEADER_WORDS];
    const char *data;
    uint64_t nbytes, sent;
    struct operation *operation;
} outgoing;

/* One end of a connection, and the emulated rank and group that it stands for. */
typedef struct {
    int fd, peer, woken, watched_out;
    struct group *group;
    char box[BOX_BYTES];
    size_t have;
    /* The message whose data are being received: where they go, and how many bytes are left. */
    uint64_t header[HEADER_WORDS];
    char *into;
    uint64_t into_bytes, at, left;
    outgoing *out;
    int first_out, n_out, out_room;
} end_t;

/* Messages of one operation between the real rank and one emulated rank. */
typedef struct {
    struct operation *operation;
    end_t *end;
    messages asked, offered;
    int sent, granted, arrived, in_turn;
} pair;

/* Data that the real rank has sent, by what they answer and their size. */
typedef struct kept {
    int part;
    uint64_t nbytes;
    char *data;
    struct kept *next;
} kept;

typedef struct operation {
    struct group *group;
    uint64_t slot;
    int kind;
    double begin_s, first_s, last_s;
    int64_t in_bytes, out_bytes, n_messages;
    pair *pairs; /* by place of the emulated rank; without an end until its first message */
    kept *kept;
    int users, over; /* places in queues that refer to it; whether the group has forgotten it */
} operation;

typedef struct group {
    int id, size, place, link, checked;
    operation *operations[MOST_OPERATIONS + 1];
    int n_operations;
    end_t **ends; /* by place of the emulated rank */
} group;

typedef struct {
    double in_s, out_s;
} link_t;

typedef struct {
    int32_t group, reserved;
    uint64_t slot;
    int64_t in_bytes, out_bytes, n_messages;
    double first_s, begin_s, last_s;
} row;

typedef struct {
    double due_s;
    uint64_t number;
    pair *pair;
} due_t;

/* Asks Python when the emulated ranks come to an operation; not a number where real ranks disagree. */
typedef double (*begin_t)(int group, uint64_t slot, double now_s);

typedef struct {
    double latency_s, bytes_per_s;
    begin_t begin;
    int epoll_fd;
    group **groups;
    int n_groups;
    link_t *links;
    int n_links;
    pair **turn; /* a ring: what may act now */
    int turn_room, turn_first, n_turn;
    due_t *due; /* a heap: what is due later */
    int n_due, due_room;
    uint64_t numbers;
    end_t **woken;
    int n_woken, woken_room;
    row *log;
    int n_log, log_room;
    char *zeros, *scrap;
    uint64_t n_zeros;
    int failed_group;
    char failure[256];
} peer;

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

/* Memory is small and bounded by the messages under way, so that there is nothing to do without it. */
static void *grown(void *items, size_t bytes) {
    void *more = realloc(items, bytes);
    if (more == NULL) {
        perror("emulated ranks");
        abort();
    }
    return more;
}

static void *cleared(size_t n, size_t bytes) {
    void *items = grown(NULL, n * bytes);
    memset(items, 0, n * bytes);
    return items;
}

#define ROOM(items, n, room)                                      \
    do {                                                          \
        if ((n) == (room)) {                                      \
            (room) = (room) ? 2 * (room) : 16;                    \
            (items) = grown((items), (room) * sizeof *(items));   \
        }                                                         \
    } while (0)

static int kind_of(uint64_t slot) { return (int)(slot >> 56); }

static void release(operation *op) {
    if (--op->users > 0 || !op->over)
        return;
    for (int i = 0; i < op->group->size; i++) {
        free(op->pairs[i].asked.items);
        free(op->pairs[i].offered.items);
    }
    while (op->kept) {
        kept *next = op->kept->next;
        free(op->kept->data);
        free(op->kept);
        op->kept = next;
    }
    free(op->pairs);
    free(op);
}

static int fail(peer *p, const group *of, const char *text) {
    p->failed_group = of->id;
    snprintf(p->failure, sizeof p->failure, "%s", text);
    return -1;
}

/* --- Which messages may go, and when: `Operation` in `_operations.py` says why. --- */

static void predecessors(const operation *op, int other, int *steps, int *queued) {
    const group *g = op->group;
    int ahead = ((g->place - other) % g->size + g->size) % g->size;
    *steps = *queued = 0;
    if (op->kind == BROADCAST) {
        *steps = -1;
        for (; ahead; ahead >>= 1)
            ++*steps;
    } else if (op->kind == SCATTER)
        *queued = g->place - (other < g->place);
}

static int part_of(const operation *op, int other, int number) {
    if (op->kind == ALL_GATHER)
        return number % 2;
    return op->kind == ALL_TO_ALL ? other : 0;
}

static kept *kept_of(const operation *op, int part, uint64_t nbytes) {
    for (kept *data = op->kept; data; data = data->next)
        if (data->part == part && data->nbytes == nbytes)
            return data;
    return NULL;
}

static const char *zeros_of(peer *p, uint64_t nbytes) {
    if (nbytes > p->n_zeros) {
        /* Untouched pages all read as the system's one page of zeros. Smaller areas may still be on their way out. */
        p->n_zeros = 2 * nbytes;
        p->zeros = mmap(NULL, p->n_zeros, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p->zeros == MAP_FAILED) {
            perror("emulated ranks");
            abort();
        }
    }
    return p->zeros;
}

/* Data for the real rank; NULL while small data that must be its own have not come. */
static const char *data_of(peer *p, const pair *q, int number, uint64_t nbytes) {
    const operation *op = q->operation;
    const group *g = op->group;
    int others_own = op->kind == ALL_GATHER || op->kind == ALL_TO_ALL;
    if (others_own && nbytes <= AWAITED_BYTES) {
        int has_come = q->arrived > 0;
        if (op->kind == ALL_GATHER) {
            has_come = 0;
            for (int i = 0; i < g->size; i++)
                has_come |= op->pairs[i].arrived > number % 2;
        }
        if (!has_come)
            return NULL;
    }
    const kept *data = kept_of(op, part_of(op, q->end->peer, number), nbytes);
    return data ? data->data : zeros_of(p, nbytes);
}

static void send_message(end_t *end, operation *op, int what, uint64_t nbytes, const char *data) {
    if (end->fd < 0)
        return;
    if (end->first_out && end->first_out == end->n_out)
        end->first_out = end->n_out = 0;
    ROOM(end->out, end->n_out, end->out_room);
    outgoing *item = &end->out[end->n_out++];
    memset(item, 0, sizeof *item);
    item->nbytes = data ? nbytes : 0;
    item->data = data;
    item->header[0] = HEADER_BYTES + item->nbytes;
    item->header[1] = (uint64_t)what;
    item->header[2] = op->slot;
    item->header[4] = nbytes;
    item->operation = op;
    op->users++;
}

static double try_send(peer *p, pair *q, double now_s) {
    if (q->sent >= q->asked.n)
        return NEVER_S;
    operation *op = q->operation;
    message asked = q->asked.items[q->sent];
    const char *data = data_of(p, q, q->sent, asked.nbytes);
    if (data == NULL)
        return NEVER_S;
    link_t *link = &p->links[op->group->link];
    int steps, queued;
    predecessors(op, q->end->peer, &steps, &queued);
    double takes_s = (double)asked.nbytes / p->bytes_per_s;
    double there_s = op->begin_s + (steps + (steps != 0)) * p->latency_s + (steps + queued) * takes_s;
    double due_s = fmax(fmax(there_s, asked.announced_s + p->latency_s) + p->latency_s, link->in_s) + takes_s;
    if (due_s > now_s)
        return due_s;
    link->in_s = due_s;
    q->sent++;
    op->out_bytes += (int64_t)asked.nbytes;
    op->n_messages++;
    op->last_s = now_s;
    send_message(q->end, op, SEND_READY, asked.nbytes, NULL);
    send_message(q->end, op, DATA, asked.nbytes, data);
    return now_s;
}

static double try_receive(peer *p, pair *q, double now_s) {
    if (q->granted >= q->offered.n)
        return NEVER_S;
    operation *op = q->operation;
    message offered = q->offered.items[q->granted];
    link_t *link = &p->links[op->group->link];
    double due_s = fmax(fmax(offered.announced_s, op->begin_s) + p->latency_s, link->out_s);
    if (due_s > now_s)
        return due_s;
    link->out_s = due_s + (double)offered.nbytes / p->bytes_per_s;
    q->granted++;
    send_message(q->end, op, RECV_READY, offered.nbytes, NULL);
    return now_s;
}

/* --- What may act now, and what is due later. --- */

static void push_turn(peer *p, pair *q) {
    if (p->n_turn == p->turn_room) {
        int room = p->turn_room ? 2 * p->turn_room : 64;
        pair **turn = grown(NULL, (size_t)room * sizeof *turn);
        for (int i = 0; i < p->n_turn; i++)
            turn[i] = p->turn[(p->turn_first + i) % p->turn_room];
        free(p->turn);
        p->turn = turn, p->turn_room = room, p->turn_first = 0;
    }
    p->turn[(p->turn_first + p->n_turn++) % p->turn_room] = q;
    q->operation->users++;
}

static void enqueue(peer *p, pair *q) {
    if (!q->in_turn) {
        q->in_turn = 1;
        push_turn(p, q);
    }
}

static int earlier(const due_t *a, const due_t *b) {
    return a->due_s < b->due_s || (a->due_s == b->due_s && a->number < b->number);
}

static void push_due(peer *p, double due_s, pair *q) {
    ROOM(p->due, p->n_due, p->due_room);
    due_t item = {due_s, p->numbers++, q};
    q->operation->users++;
    int at = p->n_due++;
    while (at && earlier(&item, &p->due[(at - 1) / 2])) {
        p->due[at] = p->due[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    p->due[at] = item;
}

static pair *pop_due(peer *p) {
    pair *first = p->due[0].pair;
    due_t item = p->due[--p->n_due];
    int at = 0;
    for (;;) {
        int child = 2 * at + 1;
        if (child >= p->n_due)
            break;
        if (child + 1 < p->n_due && earlier(&p->due[child + 1], &p->due[child]))
            child++;
        if (!earlier(&p->due[child], &item))
            break;
        p->due[at] = p->due[child];
        at = child;
    }
    if (p->n_due)
        p->due[at] = item;
    return first;
}

/* --- Connections. --- */

static void forget_out(end_t *end) {
    for (; end->first_out < end->n_out; end->first_out++)
        release(end->out[end->first_out].operation);
    end->first_out = end->n_out = 0;
}

static void flush(end_t *end) {
    while (end->first_out < end->n_out) {
        struct iovec parts[MOST_PARTS];
        int n = 0;
        for (int i = end->first_out; i < end->n_out && n + 2 <= MOST_PARTS; i++) {
            outgoing *item = &end->out[i];
            uint64_t of_header = item->sent < HEADER_BYTES ? HEADER_BYTES - item->sent : 0;
            uint64_t of_data = item->sent > HEADER_BYTES ? item->sent - HEADER_BYTES : 0;
            if (of_header) {
                parts[n].iov_base = (char *)item->header + item->sent;
                parts[n++].iov_len = of_header;
            }
            if (item->nbytes > of_data) {
                parts[n].iov_base = (char *)(uintptr_t)item->data + of_data;
                parts[n++].iov_len = item->nbytes - of_data;
            }
        }
        struct msghdr all = {.msg_iov = parts, .msg_iovlen = (size_t)n};
        ssize_t sent = sendmsg(end->fd, &all, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK) /* the other end has gone */
                forget_out(end);
            return;
        }
        uint64_t done = (uint64_t)sent;
        while (end->first_out < end->n_out) {
            outgoing *item = &end->out[end->first_out];
            uint64_t left = HEADER_BYTES + item->nbytes - item->sent;
            if (done < left) {
                item->sent += done;
                break;
            }
            done -= left;
            end->first_out++;
            release(item->operation);
        }
    }
}

/* Be woken when the socket takes more, as long as something waits for that. */
static void watch(peer *p, end_t *end) {
    int out = end->first_out < end->n_out;
    if (end->fd < 0 || out == end->watched_out)
        return;
    struct epoll_event event = {.events = EPOLLIN | (out ? EPOLLOUT : 0), .data.ptr = end};
    epoll_ctl(p->epoll_fd, EPOLL_CTL_MOD, end->fd, &event);
    end->watched_out = out;
}

static void log_oldest(peer *p, group *g) {
    operation *op = g->operations[0];
    memmove(g->operations, g->operations + 1, sizeof *g->operations * (size_t)--g->n_operations);
    ROOM(p->log, p->n_log, p->log_room);
    p->log[p->n_log++] = (row){g->id, 0, op->slot, op->in_bytes, op->out_bytes, op->n_messages,
                               op->first_s, op->begin_s, op->last_s};
    op->over = 1;
    op->users++;
    release(op);
}

/* The operation that a message belongs to; its first message begins it. NULL where real ranks disagree. */
static operation *operation_of(peer *p, group *g, uint64_t slot) {
    for (int i = g->n_operations; i--;)
        if (g->operations[i]->slot == slot)
            return g->operations[i];
    double now_s = now(), begin_s = now_s;
    if (g->checked) {
        begin_s = p->begin(g->id, slot, now_s);
        if (isnan(begin_s)) {
            fail(p, g, "");
            return NULL;
        }
    }
    operation *op = cleared(1, sizeof *op);
    op->group = g, op->slot = slot, op->kind = kind_of(slot);
    op->begin_s = begin_s, op->first_s = op->last_s = now_s;
    op->pairs = cleared((size_t)g->size, sizeof *op->pairs);
    for (int i = 0; i < g->size; i++)
        op->pairs[i].operation = op;
    g->operations[g->n_operations++] = op;
    if (g->n_operations > MOST_OPERATIONS)
        log_oldest(p, g);
    return op;
}

static int arrived(peer *p, end_t *end, const uint64_t *header) {
    group *g = end->group;
    uint64_t slot = header[2], nbytes = header[4];
    operation *op = operation_of(p, g, slot);
    if (op == NULL)
        return -1;
    double now_s = now();
    pair *q = &op->pairs[end->peer];
    q->end = end;
    if (header[1] == RECV_READY || header[1] == SEND_READY) {
        messages *of = header[1] == RECV_READY ? &q->asked : &q->offered;
        ROOM(of->items, of->n, of->room);
        of->items[of->n++] = (message){nbytes, now_s};
    } else if (header[1] == DATA) {
        if (q->granted <= q->arrived || q->offered.items[q->arrived].nbytes != nbytes) {
            char text[160];
            const char *kind = op->kind <= ALL_TO_ALL ? KINDS[op->kind] : "collective";
            snprintf(text, sizeof text, "%s: message %d to place %d, of %" PRIu64 " bytes, was not expected", kind,
                     q->arrived, end->peer, nbytes);
            return fail(p, g, text);
        }
        q->arrived++;
        op->in_bytes += (int64_t)nbytes;
        op->n_messages++;
        op->last_s = now_s;
        if (op->kind == ALL_GATHER)
            /* What one neighbour sent is what the other passes on. */
            for (int i = 0; i < g->size; i++)
                if (op->pairs[i].end != NULL && op->pairs[i].end->fd >= 0)
                    enqueue(p, &op->pairs[i]);
    } else {
        char text[96];
        snprintf(text, sizeof text, "message %" PRIu64 " is of an older protocol of gloo; update torch", header[1]);
        return fail(p, g, text);
    }
    enqueue(p, q);
    return 0;
}

/* Where the data of a message go: what is longer than is kept is written over itself. */
static int place_data(peer *p, end_t *end, const uint64_t *header) {
    end->into = p->scrap, end->into_bytes = SCRAP_BYTES;
    uint64_t nbytes = header[4];
    if (nbytes > KEPT_BYTES)
        return 0;
    operation *op = operation_of(p, end->group, header[2]);
    if (op == NULL)
        return -1;
    int part = part_of(op, end->peer, op->pairs[end->peer].arrived);
    kept *data = kept_of(op, part, nbytes);
    if (data == NULL) {
        data = cleared(1, sizeof *data);
        *data = (kept){part, nbytes, cleared(1, nbytes), op->kept};
        op->kept = data;
    }
    end->into = data->data, end->into_bytes = nbytes;
    return 0;
}

/* Take whole messages out of the box, and what there is of a last one's data. */
static int open_box(peer *p, end_t *end) {
    size_t at = 0;
    while (end->have - at >= HEADER_BYTES) {
        memcpy(end->header, end->box + at, HEADER_BYTES);
        at += HEADER_BYTES;
        if (end->header[1] == DATA && end->header[4]) {
            if (place_data(p, end, end->header) < 0)
                return -1;
            uint64_t nbytes = end->header[4], there = end->have - at;
            there = there < nbytes ? there : nbytes;
            memcpy(end->into, end->box + at, there);
            at += there;
            if (there < nbytes) {
                end->at = there, end->left = nbytes - there;
                break;
            }
        }
        if (arrived(p, end, end->header) < 0)
            return -1;
    }
    memmove(end->box, end->box + at, end->have - at);
    end->have -= at;
    return 0;
}

/* 1 while the other end is there, 0 when it has gone, -1 for a message that does not belong. */
static int receive(peer *p, end_t *end) {
    for (uint64_t taken = 0; taken < MOST_AT_ONCE;) {
        ssize_t got;
        if (end->left) {
            uint64_t room = end->into_bytes - end->at;
            got = recv(end->fd, end->into + end->at, room < end->left ? room : end->left, MSG_DONTWAIT);
        } else
            got = recv(end->fd, end->box + end->have, BOX_BYTES - end->have, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK;
        if (got == 0)
            return 0;
        taken += (uint64_t)got;
        if (end->left) {
            end->at = (end->at + (uint64_t)got) % end->into_bytes;
            end->left -= (uint64_t)got;
            if (end->left == 0 && arrived(p, end, end->header) < 0)
                return -1;
        } else {
            end->have += (size_t)got;
            if (open_box(p, end) < 0)
                return -1;
        }
    }
    return 1;
}

static int exchange(peer *p, end_t *end, uint32_t events) {
    if (events & EPOLLOUT)
        flush(end);
    if (events & ~(uint32_t)EPOLLOUT) {
        int state = receive(p, end);
        if (state < 0)
            return -1;
        if (state == 0) {
            epoll_ctl(p->epoll_fd, EPOLL_CTL_DEL, end->fd, NULL);
            close(end->fd);
            end->group->ends[end->peer] = NULL;
            end->fd = -1;
            forget_out(end);
            return 0;
        }
    }
    watch(p, end);
    return 0;
}

/* Send or grant one message of every operation in turn, for as long as there are any. */
static void take_turns(peer *p) {
    while (p->n_turn) {
        pair *q = p->turn[p->turn_first];
        p->turn_first = (p->turn_first + 1) % p->turn_room;
        p->n_turn--;
        double now_s = now();
        double receive_s = try_receive(p, q, now_s), send_s = try_send(p, q, now_s);
        double again_s = receive_s < send_s ? receive_s : send_s;
        operation *op = q->operation;
        if (again_s <= now_s) {
            push_turn(p, q);
            if (!q->end->woken) {
                q->end->woken = 1;
                ROOM(p->woken, p->n_woken, p->woken_room);
                p->woken[p->n_woken++] = q->end;
            }
        } else {
            q->in_turn = 0;
            if (again_s < NEVER_S)
                push_due(p, again_s, q);
        }
        release(op);
    }
    for (int i = 0; i < p->n_woken; i++) {
        end_t *end = p->woken[i];
        end->woken = 0;
        if (end->fd >= 0) {
            flush(end);
            watch(p, end);
        }
    }
    p->n_woken = 0;
}

static int next_events(peer *p, struct epoll_event *events) {
    if (p->n_due == 0)
        return epoll_wait(p->epoll_fd, events, MOST_EVENTS, -1);
    /* epoll's own patience is in whole milliseconds, which is too coarse for latencies. */
    double left_s = p->due[0].due_s - now();
    if (left_s > 0) {
        struct timespec left = {(time_t)left_s, (long)(1e9 * (left_s - floor(left_s)))};
        struct pollfd any = {p->epoll_fd, POLLIN, 0};
        ppoll(&any, 1, &left, NULL);
    }
    return epoll_wait(p->epoll_fd, events, MOST_EVENTS, 0);
}

/* --- What Python calls. --- */

peer *peer_new(double latency_s, double bytes_per_s, begin_t begin) {
    peer *p = cleared(1, sizeof *p);
    p->latency_s = latency_s, p->bytes_per_s = bytes_per_s, p->begin = begin;
    p->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    p->scrap = grown(NULL, SCRAP_BYTES);
    return p;
}

/* Return when this descriptor, which is Python's, is readable. */
int peer_watch(peer *p, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    return epoll_ctl(p->epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

/* A group as one real rank meets it; `link` counts real ranks, `checked` asks Python when its operations begin. */
int peer_group(peer *p, int size, int place, int link, int checked) {
    group *g = cleared(1, sizeof *g);
    g->id = p->n_groups, g->size = size, g->place = place, g->link = link, g->checked = checked;
    g->ends = cleared((size_t)size, sizeof *g->ends);
    p->groups = grown(p->groups, sizeof *p->groups * (size_t)(p->n_groups + 1));
    p->groups[p->n_groups] = g;
    while (p->n_links <= link) {
        p->links = grown(p->links, sizeof *p->links * (size_t)(p->n_links + 1));
        p->links[p->n_links++] = (link_t){0, 0};
    }
    return p->n_groups++;
}

/* A connection of a group, which is this loop's from now on. */
int peer_connection(peer *p, int fd, int of_group, int other) {
    end_t *end = cleared(1, sizeof *end);
    end->fd = fd, end->peer = other, end->group = p->groups[of_group];
    end->group->ends[other] = end;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = end};
    return epoll_ctl(p->epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

/* 0: a descriptor of Python's is readable; 1: a message did not belong (`peer_failure`). */
int peer_serve(peer *p) {
    struct epoll_event events[MOST_EVENTS];
    for (;;) {
        int n = next_events(p, events), pythons = 0;
        /* First everything that has come, then everything that is due, then messages in turn. */
        for (int i = 0; i < n; i++) {
            if (events[i].data.ptr == NULL)
                pythons = 1;
            else if (exchange(p, events[i].data.ptr, events[i].events) < 0)
                return 1;
        }
        double now_s = now();
        while (p->n_due && p->due[0].due_s <= now_s) {
            pair *q = pop_due(p);
            operation *op = q->operation;
            enqueue(p, q);
            release(op);
        }
        take_turns(p);
        if (pythons)
            return 0;
    }
}

int peer_failure(const peer *p, char *text, int room) {
    snprintf(text, (size_t)room, "%s", p->failure);
    return p->failed_group;
}

/* Write all operations into the log; how many rows it has. */
int peer_finish(peer *p) {
    for (int i = 0; i < p->n_groups; i++)
        while (p->groups[i]->n_operations)
            log_oldest(p, p->groups[i]);
    return p->n_log;
}

void peer_rows(const peer *p, row *rows) { memcpy(rows, p->log, sizeof *rows * (size_t)p->n_log); }
