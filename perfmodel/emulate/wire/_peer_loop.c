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
/* As much of a long message is taken before others have their turn, and before what has come is passed on. */
#define MOST_AT_ONCE (1 << 16)
#define MOST_PARTS 64
#define MOST_OPERATIONS 64
/* Data of an operation without messages under way are given up once so many newer ones have begun: gloo runs two at a
   time. Those that must be the real rank's own are kept for longer, since nothing else can be sent in their place. */
#define DATA_OPERATIONS 4
#define OWN_DATA_OPERATIONS 16
#define MOST_SPARE 64
/* Receiving is granted ahead of the next operation for so many messages, if what follows has been foreseen so often in
   succession. A ring posts two messages at a time. */
#define AHEAD_MESSAGES 2
#define FORESEEN_OFTEN 2
#define MOST_FORMS 64
#define NUMBER_BITS (0xFFFFFFFFull << 24)
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

/* Data that the real rank sends, by what they answer: `Operation._key`. `data` is NULL for what is too long to be kept;
   `number` is that of the message that brings them, -1 once it has begun. */
typedef struct kept {
    int part, peer, number;
    uint64_t size, nbytes, arrived;
    char *data;
    uint64_t room;
    struct operation *operation;
    struct kept *next;
} kept;

/* A message on its way out: its header, its data, and how much of both has left. `source`: the data are still coming. */
typedef struct {
    uint64_t header[HEADER_WORDS];
    const char *data;
    uint64_t nbytes, sent;
    kept *source;
    struct operation *operation;
} outgoing;

/* One end of a connection, and the emulated rank and group that it stands for. */
typedef struct {
    int fd, peer, woken, watched_out, stalled;
    struct group *group;
    char box[BOX_BYTES];
    size_t have;
    /* The message whose data are being received: where they go, and how many bytes are left. */
    uint64_t header[HEADER_WORDS];
    char *into;
    uint64_t into_bytes, at, left;
    kept *into_kept;
    outgoing *out;
    int first_out, n_out, out_room;
} end_t;

/* A collective that a group has called: its slot without its number, the place and number of the messages that the real
   rank sends first, and what followed it last time, how often in succession. */
typedef struct {
    uint64_t slot, nbytes;
    int place, n_offers;
    uint64_t next_slot, next_nbytes;
    int foreseen;
} form;

/* Messages of one operation between the real rank and one emulated rank. */
typedef struct {
    struct operation *operation;
    end_t *end;
    messages asked, offered;
    int sent, granted, arrived, in_turn;
    int ahead; /* messages that were granted before the operation began */
} pair;

typedef struct operation {
    struct group *group;
    uint64_t slot;
    int kind;
    double begin_s, first_s, last_s;
    int64_t in_bytes, out_bytes, n_messages;
    pair *pairs; /* by place of the emulated rank; without an end until its first message */
    kept *kept;
    int announced;
    form *form; /* NULL where there are too many */
    int users, over; /* places in queues that refer to it; whether the group has forgotten it */
} operation;

/* Messages of an operation that are granted before it begins; `due`: not sent yet. */
typedef struct {
    uint64_t slot, nbytes;
    int place, messages, due;
} ahead_t;

typedef struct group {
    struct peer *peer;
    int id, size, place, link, checked;
    int ring, source; /* groups of one ring, and the place whose data reach the emulated ranks: `ring_source` */
    operation *operations[MOST_OPERATIONS + 1];
    int n_operations;
    end_t **ends; /* by place of the emulated rank */
    form forms[MOST_FORMS];
    int n_forms, newest; /* the form that was called last, -1 before the first */
    uint64_t newest_number;
    ahead_t ahead[MOST_OPERATIONS]; /* a ring, the latest at `n_ahead - 1` */
    unsigned n_ahead;
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

/* Memory of data that are no longer needed. The last one in is the first out, since the processor still has it. */
typedef struct {
    char *data;
    uint64_t room;
} spare_t;

typedef struct peer {
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
    end_t **stalled; /* they wait for data that they pass on */
    int n_stalled, stalled_room;
    row *log;
    int n_log, log_room;
    char *zeros, *scrap;
    uint64_t n_zeros;
    spare_t spare[MOST_SPARE];
    int n_spare;
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

/* Memory of at least so many bytes, what was given back last if it fits: fresh pages cost as much as receiving. */
static char *take_room(peer *p, uint64_t nbytes, uint64_t *room) {
    for (int i = p->n_spare; i--;) {
        spare_t spare = p->spare[i];
        if (spare.room >= nbytes && spare.room <= 2 * nbytes + 4096) {
            memmove(p->spare + i, p->spare + i + 1, sizeof *p->spare * (size_t)(--p->n_spare - i));
            *room = spare.room;
            return spare.data;
        }
    }
    *room = nbytes ? nbytes : 1;
    return grown(NULL, *room);
}

static void give_back(peer *p, char *data, uint64_t room) {
    if (data == NULL)
        return;
    if (p->n_spare == MOST_SPARE) {
        free(p->spare[0].data);
        memmove(p->spare, p->spare + 1, sizeof *p->spare * (size_t)--p->n_spare);
    }
    p->spare[p->n_spare++] = (spare_t){data, room};
}

static void forget_data(operation *op) {
    while (op->kept) {
        kept *next = op->kept->next;
        give_back(op->group->peer, op->kept->data, op->kept->room);
        free(op->kept);
        op->kept = next;
    }
}

static void release(operation *op) {
    if (--op->users > 0 || !op->over)
        return;
    for (int i = 0; i < op->group->size; i++) {
        free(op->pairs[i].asked.items);
        free(op->pairs[i].offered.items);
    }
    forget_data(op);
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

static int returns_own(const operation *op) { return op->kind == ALL_GATHER || op->kind == ALL_TO_ALL; }

static int part_of(const operation *op, int other, int number) {
    if (op->kind == ALL_GATHER)
        return number % 2;
    return op->kind == ALL_TO_ALL ? other : 0;
}

static kept *kept_of(const operation *op, int other, int number, uint64_t nbytes) {
    int part = part_of(op, other, number);
    uint64_t size = returns_own(op) ? 0 : nbytes;
    for (kept *data = op->kept; data; data = data->next)
        if (data->part == part && data->size == size)
            return data;
    return NULL;
}

/* Make the place of a granted message, whose data are certain to come, if it is the first of its key. */
static void remember(operation *op, int other, int number, uint64_t nbytes) {
    if (kept_of(op, other, number, nbytes) != NULL)
        return;
    kept *data = cleared(1, sizeof *data);
    data->part = part_of(op, other, number);
    data->size = returns_own(op) ? 0 : nbytes;
    data->peer = other, data->number = number, data->nbytes = nbytes;
    data->operation = op, data->next = op->kept;
    if (nbytes <= KEPT_BYTES)
        data->data = take_room(op->group->peer, nbytes, &data->room);
    op->kept = data;
}

/* The same operation of the real rank whose data reach the emulated ones; NULL before its first message. */
static const operation *source_of(const peer *p, const operation *op) {
    const group *own = op->group;
    if (own->place == own->source || op->kind != ALL_GATHER)
        return op;
    for (int i = 0; i < p->n_groups; i++) {
        const group *g = p->groups[i];
        if (g->ring == own->ring && g->place == own->source)
            for (int j = g->n_operations; j--;)
                if (g->operations[j]->slot == op->slot)
                    return g->operations[j];
    }
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

/* Data for the real rank, and in `source` what they are part of, if they may still be coming; NULL until it is certain
   that those which must be its own will come. */
static const char *data_of(peer *p, const pair *q, int number, uint64_t nbytes, kept **source) {
    const operation *op = q->operation;
    int must_be_own = returns_own(op) && nbytes <= KEPT_BYTES;
    const operation *from = must_be_own ? source_of(p, op) : op;
    kept *data = from ? kept_of(from, q->end->peer, number, nbytes) : NULL;
    *source = NULL;
    if (must_be_own && data == NULL)
        return NULL;
    if (data == NULL || data->data == NULL || data->nbytes != nbytes)
        return zeros_of(p, nbytes);
    if (!must_be_own && data->arrived < data->nbytes)
        return zeros_of(p, nbytes);
    *source = data;
    return data->data;
}

static void send_message(end_t *end, operation *op, int what, uint64_t slot, uint64_t nbytes, const char *data,
                         kept *source) {
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
    item->header[2] = slot;
    item->header[4] = nbytes;
    item->operation = op;
    op->users++;
    if (source) {
        item->source = source;
        source->operation->users++;
    }
}

static void release_item(outgoing *item) {
    if (item->source)
        release(item->source->operation);
    release(item->operation);
}

/* Bytes of a message's data that could have left by now. */
static uint64_t there_of(const outgoing *item) { return item->source ? item->source->arrived : item->nbytes; }

static int is_stalled(const end_t *end) {
    if (end->first_out == end->n_out)
        return 0;
    const outgoing *item = &end->out[end->first_out];
    return there_of(item) < item->nbytes && item->sent == HEADER_BYTES + there_of(item);
}

static double try_send(peer *p, pair *q, double now_s) {
    if (q->sent >= q->asked.n)
        return NEVER_S;
    operation *op = q->operation;
    message asked = q->asked.items[q->sent];
    kept *source;
    const char *data = data_of(p, q, q->sent, asked.nbytes, &source);
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
    send_message(q->end, op, SEND_READY, op->slot, asked.nbytes, NULL, NULL);
    send_message(q->end, op, DATA, op->slot, asked.nbytes, data, source);
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
    remember(op, q->end->peer, q->granted, offered.nbytes);
    q->granted++;
    send_message(q->end, op, RECV_READY, op->slot, offered.nbytes, NULL, NULL);
    return now_s;
}

/* --- What the next operation will be. ---

   Real ranks come to a collective at about the same time, so that a receiver's readiness has often come when the sender
   looks for it. The emulated ranks do not know of an operation before its first message. Where the same one has
   followed before, they grant it together with the messages of the one before it: a grant that is not used lies at the
   real rank until its group ends, and nothing but its slot counts there (gloo: `Pair::handleRemotePendingRecv`). */

static form *form_of(group *g, uint64_t slot, uint64_t nbytes) {
    for (int i = 0; i < g->n_forms; i++)
        if (g->forms[i].slot == (slot & ~NUMBER_BITS) && g->forms[i].nbytes == nbytes)
            return &g->forms[i];
    if (g->n_forms == MOST_FORMS)
        return NULL;
    g->forms[g->n_forms] = (form){.slot = slot & ~NUMBER_BITS, .nbytes = nbytes, .place = -1};
    return &g->forms[g->n_forms++];
}

/* Learn what follows what, and foresee what follows this operation, whose first message has just come. */
static void foresee(const peer *p, operation *op, uint64_t nbytes) {
    group *g = op->group;
    if (op->kind == SEND_RECV) /* whose number is a script's own tag */
        return;
    uint64_t number = (op->slot & NUMBER_BITS) >> 24;
    int in_order = g->newest >= 0 && number == g->newest_number + 1;
    /* Operations of several threads of the library may begin in another order than their numbers have. */
    for (unsigned i = 0; i < MOST_OPERATIONS; i++) {
        const ahead_t *ahead = &g->ahead[i];
        if (ahead->messages && !ahead->due && ahead->slot == op->slot)
            op->pairs[ahead->place].ahead = ahead->messages;
    }
    form *this = form_of(g, op->slot, nbytes), *before = in_order ? &g->forms[g->newest] : NULL;
    g->newest = this ? (int)(this - g->forms) : -1;
    g->newest_number = number;
    op->form = this;
    if (this == NULL)
        return;
    if (before) {
        int right = before->next_slot == this->slot && before->next_nbytes == this->nbytes;
        before->foreseen = right ? before->foreseen + 1 : 0;
        before->next_slot = this->slot, before->next_nbytes = this->nbytes;
    }
    /* With a network of its own the readiness takes a latency, and several real ranks are to be compared first. */
    if (this->foreseen < FORESEEN_OFTEN || p->latency_s > 0 || !isinf(p->bytes_per_s) || g->checked)
        return;
    form *next = form_of(g, this->next_slot, this->next_nbytes);
    int kind = kind_of(this->next_slot);
    if (next == NULL || next->place < 0 || (kind != ALL_GATHER && kind != ALL_REDUCE))
        return;
    ahead_t *ahead = &g->ahead[g->n_ahead++ % MOST_OPERATIONS];
    ahead->slot = next->slot | ((number + 1) << 24 & NUMBER_BITS);
    ahead->place = next->place, ahead->nbytes = next->nbytes, ahead->due = 1;
    ahead->messages = next->n_offers < AHEAD_MESSAGES ? next->n_offers : AHEAD_MESSAGES;
}

/* Whether the group's real rank has sent a message of this slot. */
static int has_begun(const group *g, uint64_t slot) {
    for (int i = g->n_operations; i--;)
        if (g->operations[i]->slot == slot)
            return 1;
    return 0;
}

/* Grant the foreseen operation's first messages along with what is sent anyway. */
static void grant_ahead(end_t *end, operation *op) {
    ahead_t *ahead = &end->group->ahead[(end->group->n_ahead - 1) % MOST_OPERATIONS];
    if (!ahead->due || ahead->place != end->peer)
        return;
    ahead->due = 0;
    /* One that has begun meanwhile is granted as it is announced; granted twice, it would send more than is expected. */
    if (has_begun(end->group, ahead->slot))
        return;
    for (int i = 0; i < ahead->messages; i++)
        send_message(end, op, RECV_READY, ahead->slot, ahead->nbytes, NULL, NULL);
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
        release_item(&end->out[end->first_out]);
    end->first_out = end->n_out = 0;
}

static void flush(end_t *end) {
    while (end->first_out < end->n_out) {
        struct iovec parts[MOST_PARTS];
        int n = 0;
        for (int i = end->first_out; i < end->n_out && n + 2 <= MOST_PARTS; i++) {
            outgoing *item = &end->out[i];
            uint64_t of_header = item->sent < HEADER_BYTES ? HEADER_BYTES - item->sent : 0;
            uint64_t of_data = item->sent > HEADER_BYTES ? item->sent - HEADER_BYTES : 0, there = there_of(item);
            if (of_header) {
                parts[n].iov_base = (char *)item->header + item->sent;
                parts[n++].iov_len = of_header;
            }
            if (there > of_data) {
                parts[n].iov_base = (char *)(uintptr_t)item->data + of_data;
                parts[n++].iov_len = there - of_data;
            }
            if (there < item->nbytes) /* nothing overtakes data that have not come */
                break;
        }
        if (n == 0)
            return;
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
            release_item(item);
        }
    }
}

/* Be woken when the socket takes more, as long as something waits for that. */
static void watch(peer *p, end_t *end) {
    int stalled = is_stalled(end), out = end->first_out < end->n_out && !stalled;
    if (stalled && !end->stalled) {
        end->stalled = 1;
        ROOM(p->stalled, p->n_stalled, p->stalled_room);
        p->stalled[p->n_stalled++] = end;
    }
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

/* Whether nothing of an operation is announced, under way or in line. */
static int is_idle(const operation *op) {
    if (op->users)
        return 0;
    for (int i = 0; i < op->group->size; i++) {
        const pair *q = &op->pairs[i];
        if (q->sent < q->asked.n || q->arrived < q->offered.n)
            return 0;
    }
    return 1;
}

/* Give up the data of the operation that has become old, for new ones to use their memory. */
static void forget_old_data(const group *g) {
    static const int ages[] = {DATA_OPERATIONS, OWN_DATA_OPERATIONS};
    for (int i = 0; i < 2; i++) {
        if (g->n_operations <= ages[i])
            continue;
        operation *op = g->operations[g->n_operations - 1 - ages[i]];
        if ((i || !returns_own(op)) && is_idle(op))
            forget_data(op);
    }
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
    forget_old_data(g);
    if (g->n_operations > MOST_OPERATIONS)
        log_oldest(p, g);
    return op;
}

static void enqueue_ring(peer *p, const operation *op);

/* A message is offered: note how many its collective offers, and grant it at once if the real rank knows already. */
static void offered(peer *p, pair *q) {
    operation *op = q->operation;
    int number = q->offered.n - 1;
    if (op->form && (op->form->place < 0 || op->form->place == q->end->peer)) {
        op->form->place = q->end->peer;
        op->form->n_offers = number + 1 > op->form->n_offers ? number + 1 : op->form->n_offers;
    }
    if (number < q->ahead) {
        remember(op, q->end->peer, number, q->offered.items[number].nbytes);
        q->granted++;
        if (op->kind == ALL_GATHER)
            enqueue_ring(p, op);
    }
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
        if (!op->announced)
            foresee(p, op, nbytes);
        op->announced = 1;
        messages *of = header[1] == RECV_READY ? &q->asked : &q->offered;
        ROOM(of->items, of->n, of->room);
        of->items[of->n++] = (message){nbytes, now_s};
        if (header[1] == SEND_READY)
            offered(p, q);
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
    } else {
        char text[96];
        snprintf(text, sizeof text, "message %" PRIu64 " is of an older protocol of gloo; update torch", header[1]);
        return fail(p, g, text);
    }
    enqueue(p, q);
    return 0;
}

/* Where the data of a message go: what is not kept is written over itself. */
static int place_data(peer *p, end_t *end, const uint64_t *header) {
    end->into = p->scrap, end->into_bytes = SCRAP_BYTES, end->into_kept = NULL;
    operation *op = operation_of(p, end->group, header[2]);
    if (op == NULL)
        return -1;
    for (kept *data = op->kept; data; data = data->next)
        if (data->peer == end->peer && data->number == op->pairs[end->peer].arrived && data->data &&
            data->nbytes == header[4]) {
            end->into = data->data, end->into_bytes = data->nbytes, end->into_kept = data;
            data->number = -1;
            op->users++;
        }
    return 0;
}

/* Bytes of the message under way have come. */
static void advance(end_t *end, uint64_t nbytes) {
    end->at = (end->at + nbytes) % end->into_bytes;
    end->left -= nbytes;
    kept *data = end->into_kept;
    if (data == NULL)
        return;
    data->arrived += nbytes;
    if (end->left == 0) {
        end->into_kept = NULL;
        release(data->operation);
    }
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
            end->at = 0, end->left = nbytes;
            advance(end, there);
            if (end->left)
                break;
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
            advance(end, (uint64_t)got);
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
            if (end->into_kept)
                release(end->into_kept->operation);
            end->into_kept = NULL;
            return 0;
        }
    }
    watch(p, end);
    return 0;
}

/* Send on what has come meanwhile. */
static void resume(peer *p) {
    int n = p->n_stalled;
    p->n_stalled = 0;
    for (int i = 0; i < n; i++) {
        end_t *end = p->stalled[i];
        end->stalled = 0;
        if (end->fd >= 0) {
            flush(end);
            watch(p, end); /* which may put it back, at a place that has been read */
        }
    }
}

/* Look again at what a ring sends to any real rank of a group: what one neighbour gets is what the other sends. */
static void enqueue_ring(peer *p, const operation *op) {
    for (int i = 0; i < p->n_groups; i++) {
        group *g = p->groups[i];
        for (int j = g->ring == op->group->ring ? g->n_operations : 0; j--;) {
            operation *same = g->operations[j];
            for (int k = 0; k < g->size && same->slot == op->slot; k++)
                if (same->pairs[k].end != NULL && same->pairs[k].end->fd >= 0)
                    enqueue(p, &same->pairs[k]);
        }
    }
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
        if (receive_s <= now_s && op->kind == ALL_GATHER)
            enqueue_ring(p, op);
        if (again_s <= now_s) {
            grant_ahead(q->end, op);
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
int peer_group(peer *p, int size, int place, int link, int checked, int ring, int source) {
    group *g = cleared(1, sizeof *g);
    g->peer = p;
    g->id = p->n_groups, g->size = size, g->place = place, g->link = link, g->checked = checked;
    g->ring = ring, g->source = source, g->newest = -1;
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
        resume(p);
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
